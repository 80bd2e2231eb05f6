"""A rank on which nothing moves says where it is."""

import logging
import os
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.unit_tests.harness.models import MLPBlock, TinyMLP
from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.harness.sharded import Sharding, shard


def job_stand_still() -> tuple[list[str], list[str]]:
    """Log lines while a unit's forward takes long, and then between two steps."""
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("megatron_fsdp").addHandler(handler)
    try:
        with mock.patch.dict(os.environ, MEGATRON_FSDP_HANG_REPORT_S="0.2"):
            model = shard(TinyMLP(), Sharding(units=(MLPBlock,)))
        for _ in range(2):
            model(torch.ones(1, 6)).sum().backward()
        heard.clear()
        hook = model.module.blocks[1].register_forward_pre_hook(lambda *_: time.sleep(0.6))
        model(torch.ones(1, 6)).sum().backward()
        hook.remove()
        inside = list(heard)
        time.sleep(0.6)
        return inside, heard[len(inside) :]
    finally:
        logging.getLogger("megatron_fsdp").removeHandler(handler)


def test_a_rank_on_which_nothing_moves_tells_pass_operation_and_unit(ranks2: RankPool) -> None:
    for rank, (inside, between) in enumerate(ranks2.run(job_stand_still)):
        (text,) = inside
        assert f"nothing has moved for 0.2 s: rank {rank}, pass 5 (forward), operation" in text
        assert text.endswith("last event: enter blocks.1")
        assert between == [f"nothing has moved for 0.2 s: rank {rank}, after pass 6"]


def job_wrong(value: str) -> None:
    with mock.patch.dict(os.environ, MEGATRON_FSDP_HANG_REPORT_S=value):
        shard(TinyMLP(), Sharding(units=(MLPBlock,)))
    assert dist.is_initialized()


@pytest.mark.parametrize("value", ["soon", "-1", "inf", "nan"])
def test_a_time_that_is_none_is_refused(ranks2: RankPool, value: str) -> None:
    ranks2.run_expecting(ValueError, "MEGATRON_FSDP_HANG_REPORT_S is .* expected seconds", job_wrong, value)
