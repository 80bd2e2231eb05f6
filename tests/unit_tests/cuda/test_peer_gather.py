"""Gathers by copies between GPUs: the same losses bit for bit, and memory that goes with the model.

On a machine with 2 GPUs or more (about 1 minute):

    python -m pytest -s -m cuda tests/unit_tests/cuda/test_peer_gather.py
"""

import sys

import pytest
import torch

from tests.unit_tests.cuda.test_engine import launch

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
COPIES = {"copy_engine_gather": True}
DOUBLE = {"fsdp_double_buffer": True, "fsdp_db_use_persist_buf_on_alloc_fail": True}
RESIDENT = {"residency_bytes": 1 << 30}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_copies_lose_no_bit_and_keep_no_memory(dtype: str) -> None:
    cases = [(dtype, strategy, options) for strategy in (3, 2) for options in ({}, COPIES)]
    cases += [(dtype, 3, COPIES | options) for options in (DOUBLE, RESIDENT)]
    results = launch("gathered", *cases)
    for case, result in zip(cases, results, strict=True):
        sys.stdout.write(f"{case}: offered {result['offered']}, given back {result['given_back']}\n")
        assert len(set(result["losses"])) > 8  # something was learned
        assert result["losses"] == results[0 if case[1] == 3 else 2]["losses"], case
        assert (result["offered"] > 0) == ("copy_engine_gather" in case[2])
        assert result["given_back"] >= 0.9 * result["offered"] - (1 << 20)
