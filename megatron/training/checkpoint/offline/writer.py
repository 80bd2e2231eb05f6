"""Writing entries to a new checkpoint, one tensor at a time; it appears under its name when it is complete."""

import contextlib
import mmap
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron.training.checkpoint.format.filesystem import digest_of
from megatron.training.checkpoint.format.integrity import MANIFEST, manifest_bytes
from megatron.training.checkpoint.format.paths import RELEASE, TRACKER, iteration_folder
from megatron.training.checkpoint.format.torch_compat import FakeTensorMode
from megatron.training.checkpoint.offline.key_mapping import as_nested
from megatron.training.checkpoint.offline.lazy_reader import Entry, Source
from megatron.training.checkpoint.offline.zip_checksums import correct_checksums

Progress = Callable[[str, int], None]
"""Called with each tensor's name and bytes when it has been read."""


def _no_progress(name: str, nbytes: int) -> None:
    pass


@contextlib.contextmanager
def _appearing(path: Path) -> Iterator[Path]:
    """A temporary path that is renamed to `path` at the end, and deleted after an error.

    Raises ValueError if there is something at `path`.
    """
    if path.exists():
        raise ValueError(f"{path} exists; choose another name, or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        if partial.is_dir():
            shutil.rmtree(partial)
        else:
            partial.unlink(missing_ok=True)


class _ReadingPlanner(DefaultSavePlanner):
    """Reads each tensor when it is to be written."""

    def __init__(self, source: Source, progress: Progress):
        super().__init__(flatten_state_dict=False)  # It is flat; a list of dicts is one value.
        self._source, self._progress = source, progress

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The elements of a tensor, or a value."""
        value = self._source[index.fqn]
        if not isinstance(value, Entry):
            return value
        self._progress(index.fqn, value.nbytes)
        return value.read().contiguous()


def write_folder(source: Source, root: Path, progress: Progress = _no_progress) -> Path:
    """Writes `source` below the new folder `root`, as `--load` reads it; the checkpoint's own folder.

    Raises:
        ValueError: `root` exists, or `source` cannot be read.
        OSError: it cannot be written.
    """
    iteration = source.get("iteration")
    shapes = {name: _of_no_memory(value) for name, value in source.items()}
    with _appearing(root) as partial:
        folder = partial / RELEASE if iteration is None else iteration_folder(partial, iteration)
        folder.mkdir(parents=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*assuming the intent is to save in a single process")
            try:
                dcp.save(
                    shapes,
                    storage_writer=FileSystemWriter(str(folder), thread_count=1),
                    planner=_ReadingPlanner(source, progress),
                    no_dist=True,
                )
            except CheckpointException as error:
                raise _cause(error) from error
        files = {path.name: digest_of(path) for path in folder.iterdir()}
        (folder / MANIFEST).write_bytes(manifest_bytes(files))
        (partial / TRACKER).write_text(RELEASE if iteration is None else str(iteration), encoding="utf-8")
    return root / folder.name


def _cause(error: CheckpointException) -> Exception:
    """The error of reading or writing that torch has wrapped or covered up with one of its own."""
    cause: BaseException | None = next(iter(error.failures.values()))[0]
    while cause is not None and not isinstance(cause, (OSError, ValueError)):
        cause = cause.__cause__ or cause.__context__
    return cause or error


def _of_no_memory(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Entry) else value


def write_file(plain: Source, path: Path, progress: Progress = _no_progress) -> None:
    """Writes the plain form as a file that `torch.load(path, weights_only=True)` gives back as a nested dict.

    The file is made with gaps for the elements, which are then filled in place.

    Raises:
        ValueError: `path` exists, or `plain` cannot be read.
        OSError: it cannot be written.
    """
    with _appearing(path) as partial:
        with FakeTensorMode():
            tree = as_nested({name: _of_no_device(value) for name, value in plain.items()})
        _save_with_gaps(tree, partial)
        with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
            gaps = torch.load(partial, mmap=True, weights_only=True)
        _fill(as_nested(plain), gaps, "", progress)
        del gaps
        correct_checksums(partial)


def _save_with_gaps(tree: dict[str, Any], path: Path) -> None:
    path.touch()  # Where this fails, torch would not say why.
    try:
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(tree, path)
    except RuntimeError as error:
        raise OSError(f"{path} cannot be written; is there space for it? ({error})") from error
    with open(path, "r+b") as stream:
        # Writing to a gap for which the disk has no space would kill the process.
        os.posix_fallocate(stream.fileno(), 0, path.stat().st_size)


def _of_no_device(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype) if isinstance(value, Entry) else value


def _fill(tree: dict[str, Any], gaps: dict[str, Any], prefix: str, progress: Progress) -> None:
    for name, value in tree.items():
        if isinstance(value, dict):
            _fill(value, gaps[name], f"{prefix}{name}.", progress)
        elif isinstance(value, Entry):
            gaps[name].copy_(value.read())
            progress(prefix + name, value.nbytes)
