"""From a data set to the tensors of a micro-batch, resumable by the number of consumed samples alone."""

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from megatron.training.data.samplers import MegatronPretrainingRandomSampler, MegatronPretrainingSampler

Sample = Mapping[str, torch.Tensor]

_TRAINER_CHECK_INTERVAL_S = 1.0
"""Time that a reader may outlive its trainer."""


class Batch(NamedTuple):
    """One micro-batch on the device; `samples` x `length` except where noted."""

    tokens: torch.Tensor
    """Input ids, int64."""
    labels: torch.Tensor
    """The ids that follow them, int64."""
    loss_mask: torch.Tensor
    """1 where a label counts, else 0, float32."""
    attention_mask: torch.Tensor | None
    """True where attention is forbidden, (samples, 1, length, length); None if the data set makes none."""
    position_ids: torch.Tensor
    """Positions in the sequence, or in the document, int64."""


class DataExhaustedError(RuntimeError):
    """A data set has no micro-batch left."""


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """Options of one rank's reading of a data set, under Megatron-LM's names."""

    micro_batch_size: int
    """Samples per micro-batch of one rank."""

    data_parallel_rank: int
    """This rank in its data-parallel group."""

    data_parallel_size: int
    """Ranks in the data-parallel group."""

    device: torch.device = torch.device("cpu")
    """Device that batches go to; host memory is pinned for a CUDA device only."""

    dataloader_type: Literal["single", "cyclic"] = "single"
    """In the set's own order once, or shuffled and without end."""

    data_sharding: bool = True
    """With cyclic: every rank shuffles its own part of the set."""

    num_workers: int = 2
    """Processes that read ahead; 0 reads in this process."""

    seed: int = 1234
    """Seed of the reading processes' random numbers, so that torch's own generator is left alone."""

    def __post_init__(self) -> None:
        if self.dataloader_type not in ("single", "cyclic"):
            raise ValueError(f"--dataloader-type is {self.dataloader_type!r}; expected single or cyclic")
        if self.num_workers < 0:
            raise ValueError(f"--num-workers is {self.num_workers}; expected 0 or more")


class DataStream(Iterator[Sample]):
    """Micro-batches of a loader; says which set ran out, and when, instead of stopping silently."""

    def __init__(self, loader: DataLoader, name: str, consumed_samples: int = 0) -> None:
        self._loader = loader
        self._name = name
        self._consumed_at_start = consumed_samples
        self._count = 0
        with _signals_for_readers_pending():
            self._batches: Iterator[Sample] | None = iter(loader)

    def __next__(self) -> Sample:
        """The next micro-batch in host memory; raises DataExhaustedError when there is none."""
        if self._batches is None:
            raise RuntimeError(f"the {self._name} data stream was closed")
        try:
            batch = next(self._batches)
        except StopIteration:
            raise DataExhaustedError(
                f"the {self._name} data set ran out after {self._count} micro-batches on this rank: it has "
                f"{len(self._loader.dataset)} samples and {self._consumed_at_start} were consumed before; "
                "use more data, fewer iterations, or --dataloader-type cyclic"
            ) from None
        self._count += 1
        return batch

    def close(self) -> None:
        """Ends the reading processes; they also end with the last reference to the stream."""
        self._batches = None
        self._loader._iterator = None  # persistent workers live as long as the loader's own reference


def build_data_loader(dataset: Dataset, consumed_samples: int, options: LoaderOptions) -> DataLoader:
    """Loader of this rank's micro-batches, starting after `consumed_samples` samples of all ranks."""
    arguments = {
        "total_samples": len(dataset),
        "consumed_samples": consumed_samples,
        "micro_batch_size": options.micro_batch_size,
        "data_parallel_rank": options.data_parallel_rank,
        "data_parallel_size": options.data_parallel_size,
    }
    if options.dataloader_type == "cyclic":
        sampler = MegatronPretrainingRandomSampler(**arguments, data_sharding=options.data_sharding)
    else:
        sampler = MegatronPretrainingSampler(**arguments)
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=options.num_workers,
        pin_memory=options.device.type == "cuda",
        persistent_workers=options.num_workers > 0,
        worker_init_fn=functools.partial(_leave_interrupts_to_the_trainer, trainer=os.getpid()),
        # Without its own generator the loader draws from torch's, and resuming would change the model's randomness.
        generator=torch.Generator().manual_seed(options.seed),
    )


def build_data_stream(
    dataset: Dataset | None, name: str, consumed_samples: int, options: LoaderOptions
) -> DataStream | None:
    """Stream of this rank's micro-batches of the set called `name` in errors; None if there is no such set."""
    if dataset is None:
        return None
    return DataStream(build_data_loader(dataset, consumed_samples, options), name, consumed_samples)


def get_batch(stream: Iterator[Sample], device: torch.device) -> Batch:
    """The next micro-batch of `stream`, on `device`."""
    sample = next(stream)
    moved = {name: sample[name].to(device, non_blocking=True) if name in sample else None for name in Batch._fields}
    return Batch(**moved)


@contextlib.contextmanager
def _signals_for_readers_pending() -> Iterator[None]:
    """Processes that are started inside get no SIGINT, SIGTERM or SIGUSR1 until they are ready to judge it.

    Otherwise one that comes early ends them, or is lost in a handler that they inherit.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave_interrupts_to_the_trainer(worker: int, *, trainer: int) -> None:
    """Ctrl-C and a launcher's SIGTERM or SIGUSR1 reach the whole process group; only `trainer` should act on them.

    A trainer that saves before it ends needs its readers until then.
    """
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # Blocked since the start, and here for good: pending until the thread takes it. Threads started later inherit that.
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGTERM})
    threading.Thread(target=_end_with_the_trainer, args=(trainer,), daemon=True).start()


def _end_with_the_trainer(trainer: int) -> None:
    """Ends this process when the trainer says so, as one that exits without closing its loaders does, or is no more.

    torch's own watchdog would not notice a trainer that died before the watchdog was made.
    """
    while os.getppid() == trainer:
        received = signal.sigtimedwait({signal.SIGTERM}, _TRAINER_CHECK_INTERVAL_S)
        if received is not None and received.si_pid == trainer:
            break
    os._exit(0)
