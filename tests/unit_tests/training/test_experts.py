"""Mixtures of experts, and checkpoints of them that go on with other expert-parallel ranks."""

import pytest

from megatron.training.checkpoint.offline.lazy_reader import open_source
from tests.unit_tests.training.runs import Outcome, train

FLAGS = (
    "--train-iters 4 --attention-dropout 0 --hidden-dropout 0 --swiglu --disable-bias-linear --num-experts 4 "
    "--moe-ffn-hidden-size 64 --moe-aux-loss-coeff 1e-2 --moe-token-dispatcher-type alltoall --clip-grad 0.5 "
)
SPREAD = "--expert-model-parallel-size 2 "


def jobs(*flags: str) -> list[Outcome]:
    return [train(FLAGS + each) for each in flags]


def assert_close(one: Outcome, other: Outcome) -> None:
    count = min(len(one.losses), len(other.losses))
    assert one.losses[-count:] == pytest.approx(other.losses[-count:], rel=1e-5)
    assert one.norms[-count:] == pytest.approx(other.norms[-count:], rel=1e-4)


def test_experts_are_resumed_on_any_number_of_ranks(mcore_ranks1, mcore_ranks2, tmp_path):
    alone, spread, flat = (tmp_path / name for name in ("alone", "spread", "flat"))
    (whole,) = mcore_ranks1.run(jobs, f"--save {alone} --save-interval 1")[0]
    (alone / "latest_checkpointed_iteration.txt").write_text("1")
    for of_two, of_flat in mcore_ranks2.run(
        jobs,
        SPREAD + f"--load {alone} --save {spread} --save-interval 2",
        f"--load {alone} --save {flat} --moe-token-dispatcher-type allgather",
    ):
        assert_close(of_two, whole)
        assert_close(of_flat, whole)
        assert len(of_two.losses) == 3
    (spread / "latest_checkpointed_iteration.txt").write_text("2")
    (again,) = mcore_ranks1.run(jobs, f"--load {spread}")[0]
    assert_close(again, whole)
    on_two = mcore_ranks2.run(jobs, SPREAD + f"--load {spread} --data-parallel-sharding-strategy optim")
    assert_close(on_two[0][0], whole)
    names = open_source(spread)
    assert names.keys() == open_source(alone).keys() | {n for n in names if n.startswith("rng_state.rank_00001.")}
    expert = "model.module.decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight_v"
    assert names[expert].shape == (64, 32)


def test_a_checkpoint_lacks_experts_of_one_rank(mcore_ranks2, tmp_path):
    mcore_ranks2.run(jobs, SPREAD + f"--num-experts 2 --exit-interval 1 --save {tmp_path}")
    message = r"(?s)does not fit the run.*missing.*local_experts.[23].linear_fc1.weight_w"
    mcore_ranks2.run_expecting(ValueError, message, jobs, SPREAD + f"--load {tmp_path}")
