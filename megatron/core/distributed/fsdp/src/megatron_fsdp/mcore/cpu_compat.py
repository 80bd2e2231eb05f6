"""megatron-core 0.16.1 on machines without CUDA, and without TransformerEngine.

megatron-core names `torch.cuda` and `device="cuda"` literally on every path of a training step. Nothing inside `torch`
is replaced to cure that: each loaded `megatron.core.*` module has its own global `torch`, and that global is pointed at
a copy of the torch namespace whose `cuda` answers from the CPU. User code, torch itself and other packages keep the
real `torch`. The one exception is `torch.Tensor.cuda`, a method, which no module-level name can redirect.
"""

import contextlib
import functools
import importlib
import importlib.util
import logging
import sys
import types
from collections.abc import Callable

import torch

from megatron_fsdp.machine.device import default_device_type

_CPU = torch.device("cpu")

# Imported before patching, so that one call reaches every module of a GPT training step. Another call of `install`
# patches modules that are loaded later.
_MODULES = (
    "distributed",
    "distributed.finalize_model_grads",
    "models.common.embeddings.rotary_pos_embedding",
    "models.gpt",
    "models.gpt.gpt_layer_specs",
    "optimizer",
    "optimizer.clip_grads",
    "optimizer.distrib_optimizer",
    "optimizer.grad_scaler",
    "optimizer.optimizer",
    "parallel_state",
    "pipeline_parallel.p2p_communication",
    "pipeline_parallel.schedules",
    "rerun_state_machine",
    "tensor_parallel.data",
    "tensor_parallel.random",
    "timers",
    "transformer.moe.experts",
    "transformer.moe.moe_utils",
    "transformer.moe.router",
    "transformer.moe.shared_experts",
    "transformer.moe.token_dispatcher",
    "transformer.multi_token_prediction",
    "utils",
)

# Tensor factories that megatron-core calls with `device="cuda"` or `device=torch.cuda.current_device()`.
_FACTORIES = (
    "arange",
    "empty",
    "empty_like",
    "eye",
    "full",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "randint",
    "randn",
    "tensor",
    "zeros",
    "zeros_like",
)


def install() -> bool:
    """Makes megatron-core run on the CPU; returns whether it had to.

    With CUDA available only `fix_without_te` is applied. Call it before building megatron-core modules; calling it
    again is cheap and also covers modules imported since.
    """
    fix_without_te()
    if default_device_type() != "cpu":
        return False
    for name in _MODULES:
        importlib.import_module(f"megatron.core.{name}")
    proxy = _torch_on_cpu()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core.") and vars(module).get("torch") is torch:
            module.torch = proxy
    _patch_rng_tracker()
    _patch_moe_splits()
    _patch_tensor_cuda()
    return True


# megatron-core is imported inside functions: importing this module must cost nothing.


def fix_without_te() -> None:
    """Repairs two names that megatron-core 0.16.1 leaves broken wherever TransformerEngine is absent, on CUDA as well.

    - `moe_utils` tests `te_general_gemm is not None` although the failed import left the name undefined.
    - `CheckpointWithoutOutput` tests `fp8 is not None` against a default of False, and so enters the fp8 branch, whose
      `FP8GlobalStateManager` does not exist.
    """
    if importlib.util.find_spec("transformer_engine") is not None:
        return
    from megatron.core.tensor_parallel import random  # noqa: PLC0415
    from megatron.core.transformer.moe import moe_utils  # noqa: PLC0415

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    random.CheckpointWithoutOutput.__init__.__defaults__ = (None,)


@functools.cache
def _torch_on_cpu() -> types.ModuleType:
    """A copy of the torch namespace whose factories and `cuda` mean the CPU."""
    proxy = types.ModuleType("torch")
    vars(proxy).update(vars(torch))
    # Submodules imported after this copy was made are still found.
    proxy.__getattr__ = lambda name: getattr(torch, name)
    for name in _FACTORIES:
        setattr(proxy, name, _on_cpu(getattr(torch, name)))
    proxy.cuda = _cuda_on_cpu()
    return proxy


def _names_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.split(":")[0] == "cuda"
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return type(device) is int  # an ordinal, as `torch.cuda.current_device()` gives


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def wrapped(*args: object, **kwargs: object) -> torch.Tensor:
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        # Pinning needs a CUDA context.
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return wrapped


class _Event(torch.cpu.Event):
    """A CUDA event on a device without a queue: always complete, at one moment."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def elapsed_time(self, _: "_Event") -> float:
        return 0.0


class _Stream(torch.cpu.Stream):
    """A CUDA stream on a device that runs in program order."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def _cuda_on_cpu() -> types.ModuleType:
    """A `torch.cuda` whose device, streams, memory and random states are the CPU's."""

    def nothing(*_: object, **__: object) -> None: ...

    def zero_bytes(*_: object, **__: object) -> int:
        return 0

    cuda = types.ModuleType("torch.cuda")
    vars(cuda).update(vars(sys.modules["torch.cuda"]))
    stream = _Stream()
    cuda.current_device = lambda: _CPU
    cuda.device_count = lambda: 0
    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "ipc_collect"):
        setattr(cuda, name, nothing)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, zero_bytes)
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = cuda.default_stream = lambda *_, **__: stream
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.manual_seed = cuda.manual_seed_all = torch.manual_seed
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.nvtx = types.SimpleNamespace(
        range_push=nothing, range_pop=nothing, mark=nothing, range=lambda *_, **__: contextlib.nullcontext()
    )
    return cuda


def _patch_rng_tracker() -> None:
    """The random-state tracker forks the CPU generator, the one that dropout and initialization draw from here."""
    from megatron.core.tensor_parallel import random  # noqa: PLC0415

    random._get_cuda_rng_state = lambda device=None, clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    # The tracker warns whenever the CPU state changed while it held the CUDA state: always, here.
    module_logger = logging.getLogger(random.__name__)
    if _not_about_cpu_rng not in module_logger.filters:
        module_logger.addFilter(_not_about_cpu_rng)


def _not_about_cpu_rng(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed" not in record.getMessage()


def _patch_moe_splits() -> None:
    """The dispatcher makes numpy arrays only of split sizes that lie on a GPU; all_to_all_single takes no tensors."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher  # noqa: PLC0415

    def maybe_move_tensor_to_cpu(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
        return tensor.cpu().numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu
    token_dispatcher.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu


def _patch_tensor_cuda() -> None:
    """`tensor.cuda()` gives back the tensor. Without CUDA the original could only raise."""
    torch.Tensor.cuda = lambda self, *_, **__: self
