"""Writing checkpoints, so that each is seen whole or not at all; in the background if the run wants that."""

import contextlib
import logging
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from megatron.training.checkpoint.format.filesystem import Disk
from megatron.training.checkpoint.format.flatten import flattened
from megatron.training.checkpoint.format.paths import RUN_CONFIG, TRACKER, iteration_folders, read_tracker
from megatron.training.checkpoint.run_state.contents import Components, contents, without_garbage_collection
from megatron.training.checkpoint.save.async_writer import AsyncCheckpointWriter, Progress, WriterProcess
from megatron.training.checkpoint.save.dedup_planner import DedupPlanner, is_plan_owner
from megatron.training.checkpoint.save.publish import Partial, begin, discard, publish, retain
from megatron.training.checkpoint.save.storage_writer import CheckpointWriter, Written, with_storage_data
from megatron.training.collective_errors import largest, on_every_rank, on_first_rank, reason
from megatron.training.config import to_yaml
from megatron.training.errors import CollectiveError, RunError, SaveError
from megatron.training.state import Run

logger = logging.getLogger(__name__)

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """A checkpoint that has been begun and is not published."""

    iteration: int
    writer: CheckpointWriter
    started_s: float


class Saver:
    """Writes the checkpoints of a run to `--save`, one at a time."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._checkpoint = run.config.checkpoint
        self._disk = Disk()
        self._in_flight: InFlight | None = None
        self._partial: Partial | None = None  # Its folder, on rank 0.
        if self._checkpoint.save is not None and run.world.is_first:
            self._warn_of_newer(self._checkpoint.save)
        self._latest = self._tracked()  # By this run, or before it began.
        is_asynchronous = self._checkpoint.async_save and self._checkpoint.save is not None
        self._process = WriterProcess() if is_asynchronous else None

    def _warn_of_newer(self, root: Path) -> None:
        """Tells of checkpoints that this run will replace, or leave behind it, before it trains for that."""
        with contextlib.suppress(OSError):  # A save will tell.
            newer = [path.name for at, path in iteration_folders(root).items() if at > self._run.state.iteration]
            if newer:
                logger.warning(
                    "--save %s already has %s%s, and this run begins at iteration %d: it will replace what it meets "
                    "and make its own the latest; pass --load %s without --ckpt-step to go on from there, or another "
                    "--save",
                    root,
                    newer[-1],
                    f" and {len(newer) - 1} before it" if len(newer) > 1 else "",
                    self._run.state.iteration,
                    root,
                )

    def _tracked(self) -> int | str | None:
        if self._checkpoint.save is None or not self._run.world.is_first:
            return None
        with contextlib.suppress(OSError, ValueError):
            return read_tracker(self._checkpoint.save)
        return None

    def _warn_of_others(self) -> None:
        """Tells of another run that saves to the same folder, whose checkpoints and this one's get mixed."""
        if (latest := self._tracked()) != self._latest:
            logger.warning(
                "%s names %s, which this run has not saved: does another run save there? Give each a --save of its own",
                self._checkpoint.save / TRACKER,
                "nothing" if latest is None else latest,
            )

    def save(self) -> None:
        """Writes the run as it is, if `--save` is given; with `--async-save` only begins to. **Collective.**

        Raises:
            SaveError: on every rank, if one could not write this or the checkpoint before.
        """
        if self._checkpoint.save is None:
            return
        started_s, iteration = time.perf_counter(), self._run.state.iteration
        self.finish()
        waited_s = time.perf_counter() - started_s
        with self._as_save_error(iteration):
            writer = self._begin()
        self._in_flight = InFlight(iteration=iteration, writer=writer, started_s=started_s)
        if self._process is None:
            self.finish()
            return
        logger.info(
            "saving iteration %d in the background; training stood still for %.3f s (%.3f s of it for the save before)",
            iteration,
            time.perf_counter() - started_s,
            waited_s,
        )

    def poll(self) -> None:
        """Publishes what was written in the background, once all ranks have; call it after each step. **Collective.**

        Communicates only while something is being written. Raises SaveError on every rank if one could not write.
        """
        if self._process is None or self._in_flight is None:
            return
        if largest(self._process.progress(), self._run.world.device) != Progress.WRITING:
            self.finish()

    def finish(self) -> None:
        """Waits for what is being written and publishes it; nothing to do if nothing is. **Collective.**

        Raises:
            SaveError: on every rank, if one could not write.
        """
        if self._in_flight is None:
            return
        saved, self._in_flight = self._in_flight, None
        with self._as_save_error(saved.iteration):
            folder = self._publish_written(saved.writer)
        duration_s = time.perf_counter() - saved.started_s
        logger.info("saved iteration %d to %s in %.1f s", saved.iteration, folder, duration_s)

    def close(self) -> None:
        """Gives up what is being written."""
        self._in_flight = None
        self._release()
        if self._process is not None:
            self._process.close()
            self._process = None

    @without_garbage_collection()
    def _begin(self) -> CheckpointWriter:
        folder = self._on_first_rank(self._make_folder)
        if self._process is None:
            writer = CheckpointWriter(folder, self._disk)
        else:
            writer = AsyncCheckpointWriter(folder, self._process)
        components = Components(progress=True, optimizer=self._checkpoint.save_optim, rng=self._checkpoint.save_rng)
        values = contents(self._run, components)
        planner = DedupPlanner(is_owner=is_plan_owner(flattened(values), self._run.world.device))
        # Raises on every rank if one could not plan, copy or write.
        dcp.save(values, storage_writer=writer, planner=planner)
        writer.same = planner.same
        return writer

    def _make_folder(self) -> Path:
        self._partial = begin(self._disk, self._checkpoint.save, self._run.state.iteration)
        return self._partial.folder

    @without_garbage_collection()
    def _publish_written(self, writer: CheckpointWriter) -> Path:
        mine = writer.written if self._process is None else on_every_rank(self._process.result, self._run.world.device)
        written: list[Written | None] = [None] * dist.get_world_size()
        dist.gather_object(mine, written if self._run.world.is_first else None)
        folder = self._on_first_rank(lambda: self._publish(writer, written))
        self._release()
        return folder

    def _publish(self, writer: CheckpointWriter, written: list[Written]) -> Path:
        texts = {
            ".metadata": pickle.dumps(with_storage_data(writer, writer.metadata, written)),
            RUN_CONFIG: to_yaml(self._run.config).encode(),
        }
        files = {name: digest for rank in written for name, digest in rank.files.items()}
        self._warn_of_others()
        folder = publish(self._disk, self._partial, files, texts)
        self._latest = self._partial.iteration
        if self._checkpoint.save_retain_interval is not None:
            retain(self._disk, self._checkpoint.save, self._checkpoint.save_retain_interval, self._partial.iteration)
        return folder

    @contextlib.contextmanager
    def _as_save_error(self, iteration: int) -> Iterator[None]:
        """Makes a failure that all ranks know of one sentence, and clears up after it."""
        try:
            yield
        except (CollectiveError, CheckpointException) as error:
            if self._partial is not None:
                discard(self._disk, self._partial)
            self._release()
            raise SaveError(
                f"iteration {iteration} cannot be saved to {self._checkpoint.save}: {_why(error)}"
            ) from error

    def _release(self) -> None:
        if self._partial is not None:
            self._partial.release()
            self._partial = None

    def _on_first_rank(self, function: Callable[[], Value]) -> Value:
        return on_first_rank(function, self._run.world.device)


@contextlib.contextmanager
def saving(run: Run) -> Iterator[Saver]:
    """A `Saver` that in the end waits for what it writes, if all ranks come to this end. **Collective.**"""
    saver = Saver(run)
    try:
        yield saver
        saver.finish()
    except (RunError, CollectiveError) as error:
        if isinstance(error, CollectiveError) or error.is_on_every_rank:
            saver.finish()
        raise
    finally:
        saver.close()


def _why(error: CollectiveError | CheckpointException) -> str:
    """The first reason in one line."""
    if isinstance(error, CollectiveError):
        return str(error)
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {reason(cause)}".splitlines()[0]
