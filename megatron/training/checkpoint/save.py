"""Writing a checkpoint, so that it is seen whole or not at all."""

import logging
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from megatron.training.agree import AgreedError, on_first_rank, reason
from megatron.training.checkpoint.contents import Parts, contents
from megatron.training.checkpoint.disk import Disk
from megatron.training.checkpoint.files import FilesWriter, Written, described
from megatron.training.checkpoint.paths import RUN_CONFIG
from megatron.training.checkpoint.publish import Partial, begin, discard, publish, retain
from megatron.training.config import to_yaml
from megatron.training.launch import RunError
from megatron.training.state import Run

logger = logging.getLogger(__name__)

Value = TypeVar("Value")


class SaveError(RunError):
    """A checkpoint could not be written; what was there before is untouched, and so is the run."""

    is_on_every_rank = True


class Saver:
    """Writes the checkpoints of a run to `--save`."""

    def __init__(self, run: Run, disk: Disk | None = None) -> None:
        self._run = run
        self._checkpoint = run.config.checkpoint
        self._disk = disk or Disk()
        self._partial: Partial | None = None  # On rank 0 while a checkpoint is being written.

    def save(self) -> None:
        """Writes the run as it is, if `--save` is given. **Collective.**

        Raises:
            SaveError: on every rank, if one could not write.
        """
        if self._checkpoint.save is None:
            return
        started_s, iteration = time.perf_counter(), self._run.state.iteration
        try:
            folder = self._write()
        except (AgreedError, CheckpointException) as error:
            if self._partial is not None:
                discard(self._disk, self._partial)
            raise SaveError(f"iteration {iteration} cannot be saved: {_why(error)}") from error
        finally:
            if self._partial is not None:
                self._partial.release()
                self._partial = None
        logger.info("saved iteration %d to %s in %.1f s", iteration, folder, time.perf_counter() - started_s)

    def _write(self) -> Path:
        checkpoint = self._checkpoint
        parts = Parts(progress=True, optimizer=checkpoint.save_optim, rng=checkpoint.save_rng)
        writer = FilesWriter(self._on_first_rank(self._begin), self._disk)
        # Returns on every rank when all have written, and raises on every rank if one has not.
        dcp.save(contents(self._run, parts), storage_writer=writer)
        written: list[Written | None] = [None] * dist.get_world_size()
        dist.gather_object(writer.written, written if self._run.world.is_first else None)
        return self._on_first_rank(lambda: self._publish(writer, written))

    def _begin(self) -> Path:
        self._partial = begin(self._disk, self._checkpoint.save, self._run.state.iteration)
        return self._partial.folder

    def _publish(self, writer: FilesWriter, written: list[Written]) -> Path:
        texts = {
            ".metadata": pickle.dumps(described(writer, writer.metadata, written)),
            RUN_CONFIG: to_yaml(self._run.config).encode(),
        }
        files = {name: facts for rank in written for name, facts in rank.files.items()}
        folder = publish(self._disk, self._partial, files, texts)
        if self._checkpoint.save_retain_interval is not None:
            retain(self._disk, self._checkpoint.save, self._checkpoint.save_retain_interval, self._partial.iteration)
        return folder

    def _on_first_rank(self, function: Callable[[], Value]) -> Value:
        return on_first_rank(function, self._run.world.device)


def _why(error: AgreedError | CheckpointException) -> str:
    """The first reason in one line."""
    if isinstance(error, AgreedError):
        return str(error)
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {reason(cause)}".splitlines()[0]
