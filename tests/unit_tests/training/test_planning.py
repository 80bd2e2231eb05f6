"""Checkpoints of many parameters are planned in seconds, and large ones need little memory beside the run's own."""

import contextlib
import os
import re
import time
import warnings
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

PARAMETERS = 1000
FLAGS = "--lr 1e-3 --train-iters 3 --no-save-rng --no-load-rng "


class Many(nn.Module):
    """Parameters, and no arithmetic."""

    def __init__(self, count: int = PARAMETERS, *shape: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.full(shape or (3, 4), float(at)) for at in range(count))


@contextlib.contextmanager
def built(folder: Path, module: nn.Module):
    import shlex

    from megatron.training.build import build_run
    from megatron.training.config import load_config
    from megatron.training.initialize import initialized
    from megatron.training.job import prepare
    from megatron.training.ranks import Ranks
    from megatron.training.state import Task
    from tests.unit_tests.training.runs import TINY, kept_groups

    rank = dist.get_rank()
    ranks = Ranks(rank=rank, local_rank=rank, world_size=dist.get_world_size())
    job = prepare(load_config(shlex.split(TINY + FLAGS + f"--save {folder} --load {folder}")), ranks.world_size)
    task = Task(model_provider=lambda *_: module, forward_step=None, datasets_provider=None)
    with kept_groups(), initialized(job.config, job.plan, ranks) as world:
        yield build_run(job, task, world)


def save_and_load(folder: Path) -> dict[str, float]:
    """Pieces written and values read by this rank, and CPU seconds of all but writing and reading them."""
    from torch.distributed.checkpoint import FileSystemReader

    from megatron.training.checkpoint.load.loader import load_checkpoint
    from megatron.training.checkpoint.save.saver import Saver
    from megatron.training.checkpoint.save.storage_writer import CheckpointWriter

    figures = {"writing": 0.0, "reading": 0.0, "pieces": 0, "reads": 0}

    def spent(name: str, function, count: str):
        def timed(self, plan, planner):
            began_s = time.process_time()
            figures[count] += len(plan.items)
            result = function(self, plan, planner)
            figures[name] += time.process_time() - began_s
            return result

        return timed

    with (
        built(folder, Many()) as run,
        mock.patch.object(CheckpointWriter, "write_data", spent("writing", CheckpointWriter.write_data, "pieces")),
        mock.patch.object(FileSystemReader, "read_data", spent("reading", FileSystemReader.read_data, "reads")),
    ):
        (group,) = run.optimizer.param_groups
        group["eps"] = 0.25
        run.optimizer.fqn_state_dict()
        state = run.optimizer.optimizer.state
        steps = [each["step"].fill_(7.0) for each in state.values()]
        steps[3].fill_(8.0)  # One of its own.
        began_s = time.process_time()
        Saver(run).save()
        figures["planning a save"] = time.process_time() - began_s - figures["writing"]
        for each in (*steps, *(param.to_local() for param in run.model.parameters())):
            each.detach().zero_()
        group["eps"] = 9.0
        began_s = time.process_time()
        load_checkpoint(run)
        figures["planning a load"] = time.process_time() - began_s - figures["reading"]
        assert group["eps"] == 0.25
        assert [step.item() for step in steps] == [7.0, 7.0, 7.0, 8.0, *[7.0] * (PARAMETERS - 4)]
        for at, param in enumerate(run.model.parameters()):
            assert (param.to_local() == at).all()
    return figures


def test_options_and_counts_are_planned_and_read_once(mcore_ranks2, tmp_path):
    from torch.distributed.checkpoint import FileSystemReader

    both = mcore_ranks2.run(save_and_load, tmp_path)
    shards = 3 * PARAMETERS
    assert shards <= sum(each["pieces"] for each in both) < shards * 1.1
    assert all(each["reads"] < shards * 0.6 for each in both)
    for figures in both:
        assert max(figures["planning a save"], figures["planning a load"]) < 2.0, figures
    metadata = FileSystemReader(str(tmp_path / "iter_0000000")).read_metadata()
    prefix = "optimizer.param_to_group_meta.weights.{}.eps"
    places = {place.offset for key, place in metadata.storage_data.items() if key.fqn.endswith(".eps")}
    assert prefix.format(PARAMETERS - 1) in metadata.state_dict_metadata and len(places) == 1
    assert metadata.planner_data[prefix.format(0)] == ("optimizer", "param_to_group_meta", "weights.0", "eps")


def host_nbytes(name: str) -> int:
    """Memory of this process: VmRSS now, or VmHWM at most since it was reset."""
    return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


def peak_of(function) -> int:
    """The most memory that this process takes meanwhile, above what it had."""
    function()  # Memory that stays from a first time is no part of it.
    Path("/proc/self/clear_refs").write_text("5")
    resting = host_nbytes("VmRSS")
    function()
    return host_nbytes("VmHWM") - resting


def peaks(folder: Path) -> tuple[int, int, int]:
    """Bytes of this rank's shard, and what saving and loading it take besides."""
    from megatron.training.checkpoint.load.loader import load_checkpoint
    from megatron.training.checkpoint.save.saver import Saver

    with built(folder, Many(24, 1024, 1024)) as run:
        run.optimizer.fqn_state_dict()
        shard = sum(param.to_local().nbytes for param in run.model.parameters()) * 3
        return shard, peak_of(lambda: Saver(run).save()), peak_of(lambda: load_checkpoint(run))


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak of memory cannot be reset here")
def test_saving_and_loading_take_a_few_tensors_of_memory(mcore_ranks2, tmp_path):
    for shard, saving, loading in mcore_ranks2.run(peaks, tmp_path):
        assert shard == 3 * 48 << 20
        assert saving < 0.2 * shard and loading < 0.2 * shard, (saving / shard, loading / shard)


class CopyingPlanner:
    """Has its values on a GPU, as it were: each is copied to be written. Counts the copies that are alive."""

    def __init__(self) -> None:
        self.alive = self.most = 0

    def resolve_data(self, item):
        self.alive += 1
        self.most = max(self.most, self.alive)
        made = torch.ones(item.tensor_data.size)
        weakref.finalize(made, self._died)
        return made

    def _died(self) -> None:
        self.alive -= 1


def test_a_tensor_on_its_way_to_a_file_is_gone_when_the_next_one_comes(tmp_path):
    from torch.distributed.checkpoint import DefaultSavePlanner

    from megatron.training.checkpoint.format.filesystem import Disk
    from megatron.training.checkpoint.save.storage_writer import CheckpointWriter

    planner, copies = DefaultSavePlanner(), CopyingPlanner()
    planner.set_up_planner({str(at): torch.ones(5) for at in range(20)}, is_coordinator=True)
    writer = CheckpointWriter(tmp_path, Disk())
    (plan,) = writer.prepare_global_plan([planner.create_local_plan()])
    assert len(writer.write_data(plan, copies).wait()) == 20
    assert copies.most == 1 and copies.alive == 0


def test_what_is_large_is_read_in_several_threads(tmp_path):
    import threading

    import torch.distributed.checkpoint as dcp

    from megatron.training.checkpoint.format import thread_pool
    from megatron.training.checkpoint.load.storage_reader import SafeReader

    class Planner(dcp.DefaultLoadPlanner):
        def commit_tensor(self, read_item, tensor):
            readers.setdefault(threading.get_ident(), []).append(tensor.numel())

    readers: dict[int, list[int]] = {}
    saved = {f"w{at}": torch.randn(at, 100) for at in range(1, 20)}
    read = {name: torch.zeros_like(value) for name, value in saved.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
        with mock.patch.object(thread_pool, "_THREAD_NBYTES", 20_000):
            dcp.load(read, storage_reader=SafeReader(tmp_path), planner=Planner(), no_dist=True)
    assert all(torch.equal(read[name], value) for name, value in saved.items())
    assert 2 <= len(readers) <= 8 and sum(map(len, readers.values())) == 19


def test_threads_use_the_gpu_of_their_rank():
    from megatron.training.checkpoint.format.thread_pool import on_this_device

    with (
        mock.patch.object(torch.cuda, "is_initialized", lambda: True),
        mock.patch.object(torch.cuda, "current_device", lambda: 3),
        mock.patch.object(torch.cuda, "set_device") as set_device,
    ):
        on_this_device()()
    set_device.assert_called_once_with(3)
    on_this_device()()


def test_a_shared_place_is_read_anew_for_another_dtype_or_shape(tmp_path):
    """A count of 1001 that is copied from where it was read in bf16 would be 1000."""
    from types import SimpleNamespace

    from torch.distributed.checkpoint.metadata import MetadataIndex

    from megatron.training.checkpoint.load.storage_reader import duplicate_reads

    place = SimpleNamespace(relative_path="__0_0.distcp", offset=0, length=9)
    wanted = {
        "coarse": torch.tensor(0.0, dtype=torch.bfloat16), "fine": torch.tensor(0.0), "alike": torch.tensor(0.0),
        "long": torch.zeros(2), "number": 0, "text": "",
    }  # fmt: skip
    index = SimpleNamespace(storage_data={MetadataIndex(name): place for name in wanted})
    assert duplicate_reads(wanted, index) == {"alike": "fine", "text": "number"}
