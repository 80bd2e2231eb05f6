"""The summary of what was built: logged once, on the first rank, with the true numbers."""

import functools
import logging
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.unit_tests.harness.models import MLPBlock, OddModel, OddShapes, TinyMLP, freeze
from tests.unit_tests.harness.reference import DtypePolicy
from tests.unit_tests.harness.sharded import Sharding, shard

#: A square fp32 weight of this width is one MiB.
WIDTH = 512


def build(kind: str) -> nn.Module:
    if kind == "odd":
        return OddModel(depth=1)
    if kind == "large":
        return TinyMLP(width=2 * WIDTH, depth=3, bias=False)
    model = TinyMLP(width=WIDTH, depth=3, bias=False)
    return freeze(model, "blocks.0") if kind == "frozen" else model


UNITS = {"odd": (OddShapes,), "mlp": (MLPBlock,), "frozen": (MLPBlock,), "large": None, "one": None}


def summaries(kind: str, strategy: int, outer: int | None = None, **options: bool) -> list[str]:
    """Everything that is logged while a model is built."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(f"{record.levelname} {record.getMessage()}")
    logger = logging.getLogger("megatron_fsdp")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        sharding = Sharding(strategy=strategy, units=UNITS[kind], outer=outer, is_poisoned=False, options=options)
        shard(build(kind), sharding, DtypePolicy(main_grads=torch.float32))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return records


def test_one_summary_is_logged_on_the_first_rank_only(ranks3):
    logs = ranks3.run(summaries, "mlp", 3)
    assert [len(records) for records in logs] == [1, 0, 0]
    assert logs[0][0].startswith("INFO megatron_fsdp: optim_grads_params, 1,048,576 parameters in 4 units and 4 groups")


def test_a_large_model_without_units_is_a_warning_that_names_the_repeated_layer(ranks2):
    advice = (
        "WARNING fsdp_unit_modules is not given: all 4,194,304 parameters are gathered at once; name the class of the "
        "repeated layer, e.g. fsdp_unit_modules=[MLPBlock]"
    )
    first, second = ranks2.run(summaries, "large", 3)
    assert first[1:] == [advice] and second == []
    for kind, strategy in (("large", 2), ("one", 3)):  # nothing is gathered; few parameters
        assert len(ranks2.run(summaries, kind, strategy)[0]) == 1


#: strategy -> MiB of (weight, gradient) that a rank of two keeps of a weight of one MiB
KEPT = {0: (1.0, 1.0), 1: (1.0, 1.0), 2: (1.0, 0.5), 3: (0.5, 0.5)}


def head_of(text: str) -> dict[str, float]:
    numbers = re.search(
        r"([\d.]+)% padding; per rank ([\d.]+) MiB persistent, ([\d.]+) MiB of gradients from backward to zero_grad, "
        r"at most ([\d.]+) MiB of gathered weights "
        r"and ([\d.]+) MiB of gradients on their way",
        text,
    )
    return dict(
        zip(("padding", "persistent", "accumulated", "gathered", "staged"), map(float, numbers.groups()), strict=True)
    )


@pytest.mark.parametrize("strategy", range(4))
def test_the_numbers_are_those_of_one_rank(ranks2, strategy):
    text = ranks2.run(summaries, "mlp", strategy)[0][0]
    # Gathered: the root and two units, prefetch being one deep; staged: two reductions in flight.
    expected = {
        "padding": 0.0,
        "persistent": 4 * KEPT[strategy][0],
        "accumulated": 4 * KEPT[strategy][1],
        "gathered": 3.0 if strategy == 3 else 0.0,
        "staged": 2.0 if strategy >= 2 else 0.0,
    }
    assert head_of(text) == expected


def test_double_buffers_are_told_with_their_bytes(ranks2):
    def told(**options: bool) -> str:
        return (
            ranks2.run(functools.partial(summaries, **options), "mlp", 3)[0][0]
            .partition("gathered). ")[2]
            .split("\n")[0]
        )

    assert told() == ""
    # Weights and gradients of three alike units and of the root; a gradient of the root's is alike too.
    assert told(fsdp_double_buffer=True) == (
        "Of 8 communication buffers 7 alternate in 4 double buffers of 4.0 MiB together, 0 keep 0.0 MiB of their own, "
        "the others, 1.0 MiB, come and go."
    )
    assert "1 keep 1.0 MiB of their own, the others, 0.0 MiB" in told(
        fsdp_double_buffer=True, fsdp_db_use_persist_buf_on_alloc_fail=True
    )


def rows_of(text: str) -> list[list[str]]:
    return [re.split(r" {2,}", line.strip()) for line in text.splitlines()[1:]]


def test_the_table_has_a_row_for_each_kind_of_unit(ranks2):
    header, root, blocks = rows_of(ranks2.run(summaries, "mlp", 3)[0][0])
    assert header == ["unit", "groups", "parameters", "padding", "MiB persistent", "MiB gathered", "tags"]
    assert root == ["(root) TinyMLP", "1", "262,144", "0.00%", "0.5", "1.0", "float32"]
    assert blocks == ["blocks.2 MLPBlock (last of 3 alike)", "1", "262,144", "0.00%", "0.5", "1.0", "float32"]


def test_a_frozen_unit_has_no_gradient_and_its_tag(ranks2):
    text = ranks2.run(summaries, "frozen", 3)[0][0]
    _, _, frozen, rest = rows_of(text)
    assert frozen == ["blocks.0 MLPBlock", "1", "262,144", "0.00%", "0.5", "1.0", "float32,frozen"]
    assert rest[0] == "blocks.2 MLPBlock (last of 2 alike)"
    assert head_of(text)["persistent"] == 2.0 and head_of(text)["accumulated"] == 1.5


def test_an_outer_strategy_is_named_where_it_shards(ranks4):
    texts = [ranks4.run(summaries, "mlp", 3, outer)[0][0] for outer in (0, 1)]
    assert "optim_grads_params, " in texts[0] and "optim_grads_params inside optim, " in texts[1]
    # The weight rests in halves; the gradient does too, but for the optimizer it is cut once more.
    for text in texts:
        assert head_of(text)["persistent"] == head_of(text)["accumulated"] == 2.0


def count_padding(world: int) -> tuple[int, int]:
    model = shard(build("odd"), Sharding(units=(OddShapes,)))
    groups = model.param_and_grad_buffer.parameter_groups
    return sum(group.layout.size for group in groups), sum(param.numel() for param in model.parameters())


def test_padding_is_relative_to_the_parameters(ranks3):
    (size, used), *_ = ranks3.run(count_padding, 3)
    text = ranks3.run(summaries, "odd", 3)[0][0]
    assert f"{used:,} parameters" in text
    assert head_of(text)["padding"] == pytest.approx(100 * (size - used) / used, abs=0.006)


def build_quietly() -> list[str]:
    logging.getLogger("megatron_fsdp").setLevel(logging.WARNING)
    try:
        return [str(dist.get_rank())] if shard(build("odd"), Sharding(units=(OddShapes,))) is not None else []
    finally:
        logging.getLogger("megatron_fsdp").setLevel(logging.NOTSET)


def test_nothing_is_printed(ranks2, capfd):
    assert ranks2.run(build_quietly) == [["0"], ["1"]]
    assert capfd.readouterr().out == ""
