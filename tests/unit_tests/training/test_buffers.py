"""The training loop's buffer and communicator flags: the same losses, and registration once, after the first step."""

from types import SimpleNamespace

from megatron.training.build import build_callbacks
from megatron.training.callbacks import BufferRegistration, Callback
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


def on_a_communicator_of_their_own() -> tuple[list[float], list[float], list[bool]]:
    """Losses without and with the flag, and whether gathers then have another communicator than reductions."""
    axes = []

    class Look(Callback):
        def start(self, run) -> None:
            axes.append(run.model.dist_index.axes()[1])

    runs = [train(SHARDED + flags, callbacks=[Look()]) for flags in ("", "--create-all-gather-group")]
    assert all(axis.gather_group.size() == axis.size for axis in axes)
    return runs[0].losses, runs[1].losses, [axis.gather_group is not axis.group for axis in axes]


def test_gathers_on_a_communicator_of_their_own_change_no_loss(mcore_ranks2) -> None:
    for plain, apart, is_other in mcore_ranks2.run(on_a_communicator_of_their_own):
        assert len(plain) == 3 and plain == apart and is_other == [False, True]


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
