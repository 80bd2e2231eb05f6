"""`benchmarks/checkpoint_bench.py` measures what it says, for both engines, and would tell of a load that differs."""

from unittest import mock

import torch


def measure(*arguments: str) -> dict:
    from benchmarks import checkpoint_bench
    from tests.unit_tests.training.runs import kept_groups

    with kept_groups():
        return checkpoint_bench.measure(checkpoint_bench.parse(["--size", "tiny", *arguments]), torch.device("cpu"))


def measure_ours(folder: str) -> list[dict]:
    from benchmarks import checkpoint_bench

    spoiled = checkpoint_bench.shards

    def shards(optimizer):
        """Changes one number behind the bench's back whenever it looks."""
        for tensor in spoiled(optimizer):
            tensor.view(-1)[:1].neg_()
            yield tensor

    right = measure("--engine", "ours", "--folder", folder, "--syncs", "1", "--asyncs", "1")
    with mock.patch.object(checkpoint_bench, "shards", shards):
        return [right, measure("--engine", "ours", "--folder", folder, "--syncs", "0", "--asyncs", "1")]


def test_ours_is_measured_and_compared(mcore_ranks2, tmp_path):
    for right, spoiled in mcore_ranks2.run(measure_ours, str(tmp_path)):
        assert right["identical"] and not spoiled["identical"]
        assert right["disk_gib"] > 0.009 and right["host_resting_gib"] > 0.05
        times = [right["save_s"], *right["saves_s"], right["load_s"], right["load_unverified_s"], *right["async_s"]]
        assert all(0 < time < 60 for time in times) and 0 < right["stall_s"][0] <= right["async_s"][0]
        assert {
            f"{where}_{when}_gib" for where in ("gpu", "host") for when in ("save", "load", "async")
        } <= right.keys()
        assert "save_s" not in spoiled and spoiled["async_s"], "no other was asked for"


def test_fsdp2_is_measured_alike(mcore_ranks2, tmp_path):
    flags = ("--engine", "fsdp2", "--folder", str(tmp_path), "--syncs", "1", "--asyncs", "1", "--async-by", "thread")
    first, other = mcore_ranks2.run(measure, *flags)
    assert first == other and first["identical"] and first["disk_gib"] > 0.009
    assert first["stall_s"][0] <= first["async_s"][0] and 0 < first["save_s"] and 0 < first["load_s"]
