"""The training loop's buffer flags: the same losses, and registration once, after the first step."""

from types import SimpleNamespace

from megatron.training.build import build_callbacks
from megatron.training.callbacks import BufferRegistration
from megatron.training.config import load_config
from tests.unit_tests.training.runs import train

SHARDED = "--train-iters 3 --data-parallel-sharding-strategy 3 "
BUFFERS = "--megatron-fsdp-max-pool-double-buffer --fsdp-db-use-persist-buf-on-alloc-fail"


def losses() -> tuple[list[float], list[float], list[float]]:
    runs = [train(SHARDED + flags) for flags in ("", "--fsdp-double-buffer", BUFFERS)]
    return tuple(run.losses for run in runs)


def test_buffers_change_no_loss(mcore_ranks2) -> None:
    plain, doubled, largest = mcore_ranks2.run(losses)[0]
    assert len(plain) == 3 and plain == doubled == largest


def test_buffers_are_registered_once_after_the_first_step() -> None:
    calls = []
    buffer = SimpleNamespace(manual_buffer_registration=lambda: calls.append("registered"))
    run = SimpleNamespace(model=SimpleNamespace(param_and_grad_buffer=buffer))
    callback = BufferRegistration()
    callback.start(run)
    callback.before_step(run)
    assert calls == []
    for _ in range(2):
        callback.after_step(run, None)
    assert calls == ["registered"]


def test_only_registered_buffers_are_registered() -> None:
    def kinds(flags: str) -> list[type]:
        config = load_config(flags.split())
        run = SimpleNamespace(config=config, world=SimpleNamespace(is_first=False))
        return [type(callback) for callback in build_callbacks(run)]

    assert BufferRegistration in kinds("--use-nccl-ub")
    assert BufferRegistration not in kinds("--fsdp-double-buffer")
