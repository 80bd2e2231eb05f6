"""Checkpoints of many parameters are planned in seconds, whatever the number of their optimizer's options."""

import contextlib
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

PARAMETERS = 1000
FLAGS = "--lr 1e-3 --train-iters 3 --no-save-rng --no-load-rng "


class Many(nn.Module):
    """Parameters, and no arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.full((3, 4), float(at)) for at in range(PARAMETERS))


@contextlib.contextmanager
def built(folder: Path):
    import shlex

    from megatron.training.build import build_run
    from megatron.training.config import load_config
    from megatron.training.initialize import initialized
    from megatron.training.launch import prepare
    from megatron.training.ranks import Ranks
    from megatron.training.state import Task
    from tests.unit_tests.training.runs import TINY, kept_groups

    rank = dist.get_rank()
    ranks = Ranks(rank=rank, local_rank=rank, world_size=dist.get_world_size())
    job = prepare(load_config(shlex.split(TINY + FLAGS + f"--save {folder} --load {folder}")), ranks.world_size)
    task = Task(model_provider=lambda *_: Many(), forward_step=None, datasets_provider=None)
    with kept_groups(), initialized(job.config, job.plan, ranks) as world:
        yield build_run(job, task, world)


def save_and_load(folder: Path) -> dict[str, float]:
    """Pieces written and values read by this rank, and CPU seconds of all but writing and reading them."""
    from torch.distributed.checkpoint import FileSystemReader

    from megatron.training.checkpoint.files import FilesWriter
    from megatron.training.checkpoint.load import load_checkpoint
    from megatron.training.checkpoint.save import Saver

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
        built(folder) as run,
        mock.patch.object(FilesWriter, "write_data", spent("writing", FilesWriter.write_data, "pieces")),
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
