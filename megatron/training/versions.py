"""The training loop and the engine come from one distribution; a checkout beside an installed wheel could mix two."""

import megatron.training
import megatron_fsdp


def check_versions() -> None:
    """Raises RuntimeError if the two packages have different versions."""
    ours, engines = megatron.training.__version__, megatron_fsdp.__version__
    if ours != engines:
        raise RuntimeError(
            f"megatron.training {ours} ({megatron.training.__path__[0]}) and megatron_fsdp {engines} "
            f"({megatron_fsdp.__path__[0]}) are of different versions; install one of them only, or put the checkout's "
            "megatron/core/distributed/fsdp/src on PYTHONPATH"
        )
