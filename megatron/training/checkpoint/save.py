"""Writing a checkpoint: beside its place first, so that nobody ever sees half of one."""

import logging
import shutil
import time
from pathlib import Path

import torch.distributed.checkpoint as dcp

from megatron.training.agree import on_first_rank
from megatron.training.checkpoint.contents import Parts, contents
from megatron.training.checkpoint.paths import RUN_CONFIG, iteration_folder, partial_folder, write_tracker
from megatron.training.config import to_yaml
from megatron.training.state import Run

logger = logging.getLogger(__name__)


def save_checkpoint(run: Run) -> Path | None:
    """Writes the run to `--save`, if it is given; the folder's path. **Collective.**"""
    checkpoint, iteration = run.config.checkpoint, run.state.iteration
    if checkpoint.save is None:
        return None
    started_s = time.perf_counter()
    root, device = checkpoint.save, run.world.device
    partial, folder = partial_folder(root, iteration), iteration_folder(root, iteration)
    on_first_rank(lambda: _make_empty(partial), device)
    parts = Parts(progress=True, optimizer=checkpoint.save_optim, rng=checkpoint.save_rng)
    # Returns on every rank when all have written, and raises on every rank if one has not.
    dcp.save(contents(run, parts), checkpoint_id=str(partial))

    def publish() -> None:
        (partial / RUN_CONFIG).write_text(to_yaml(run.config), encoding="utf-8")
        _replace(folder, partial)
        write_tracker(root, iteration)

    on_first_rank(publish, device)
    logger.info("saved iteration %d to %s in %.1f s", iteration, folder, time.perf_counter() - started_s)
    return folder


def _make_empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)  # What an interrupted run left.
    folder.mkdir(parents=True)


def _replace(folder: Path, by: Path) -> None:
    """Moves `by` to `folder`; what was there is deleted only once it has been replaced."""
    old = folder.with_name(f".{folder.name}.replaced")
    if old.exists():
        shutil.rmtree(old)
    if folder.exists():
        folder.rename(old)
    by.rename(folder)
    if old.exists():
        shutil.rmtree(old)
