"""Writing a rank's files of a checkpoint: torch's format, each file safe on the disk and summed while it is written."""

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter, Metadata
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron.training.checkpoint.format.filesystem import ChecksummedFile, Disk, FileDigest
from megatron.training.checkpoint.format.thread_pool import even_parts, in_threads, thread_count
from megatron.training.checkpoint.format.torch_compat import StorageInfo
from megatron.training.checkpoint.save.dedup_planner import with_duplicates


@dataclass(frozen=True, kw_only=True)
class Written:
    """Files and pieces that one rank has written."""

    results: list[WriteResult]
    """The place of each piece."""
    files: dict[str, FileDigest]
    """By name, without the folder."""


class DurableFileSystem(FileSystem):
    """Files that count only once they are closed: then they are on the disk and their checksums known."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.files: dict[str, FileDigest] = {}
        """Those that are closed."""
        self.errors: list[OSError] = []
        """The errors of those that failed; torch loses the errors of its threads."""

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[ChecksummedFile]:
        """A file to write to; `mode` is wb."""
        path = Path(path)
        try:
            file = ChecksummedFile(self._disk, path)
            try:
                yield file
                self.files[path.name] = file.close()
            except Exception as error:
                raise (file.error or error) from error
            finally:
                file.discard()
        except OSError as error:
            self.errors.append(error)
            raise

    def mkdir(self, path: str | os.PathLike) -> None:
        """Nothing: rank 0 has made the folder, and where it is not to be seen the others must not make their own."""


class CheckpointWriter(FileSystemWriter):
    """Writes the files of a plan into `folder`, and keeps what rank 0 needs to describe them."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        super().__init__(folder, sync_files=False)  # Closing a file does.
        self.fs = self._files = DurableFileSystem(disk)
        self.written: Written | None = None
        """This rank's files, once they are written."""
        self.metadata: Metadata | None = None
        """On rank 0, what all ranks' files hold."""
        self.same: dict[str, str] = {}
        """On rank 0, names of what is not written -> what stands for them."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        """Writes this rank's files, in as many threads as files. Raises OSError if one could not be written.

        Each thread has one tensor in the host's memory at a time.
        """
        shares = even_parts(plan.items, thread_count(sum(map(_nbytes, plan.items))), _nbytes)
        names = [f"{plan.storage_data.prefix}{number}.distcp" for number in range(len(shares))]
        try:
            written = in_threads(functools.partial(self._write_file, planner), names, shares)
        except Exception as error:
            # torch replaces the error of a failed write by one that says less.
            raise (self._files.errors or [error])[0] from error
        results = [result for of_file in written for result in of_file]
        self.written = Written(results=results, files=self._files.files)
        return done(results)

    def _write_file(self, planner: SavePlanner, name: str, items: Sequence[WriteItem]) -> list[WriteResult]:
        results = []
        with self._files.create_stream(Path(self.path) / name, "wb") as stream:
            for item in sorted(items, key=lambda item: item.tensor_data is not None):  # Values first.
                start = stream.tell()
                data = planner.resolve_data(item)
                if isinstance(data, torch.Tensor):
                    torch.save(_alone(data), _Unclosed(stream))
                else:
                    stream.write(data.getbuffer())
                del data
                length = stream.tell() - start
                results.append(WriteResult(item.index, length, StorageInfo(name, start, length)))
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Keeps the plan of all files; `with_storage_data` makes the file of it."""
        self.metadata = metadata


class _Unclosed:
    """A stream for one of the things that a file consists of."""

    def __init__(self, stream: ChecksummedFile) -> None:
        self.write, self.flush = stream.write, stream.flush


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in host memory, in storage of its own size: torch saves whole storages."""
    tensor = tensor.detach().cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def with_storage_data(writer: CheckpointWriter, metadata: Metadata, written: list[Written]) -> Metadata:
    """`metadata` with the places of all pieces."""
    places = {result.index: result.storage_data for rank in written for result in rank.results}
    metadata.storage_data = with_duplicates(places, writer.same)
    metadata.storage_meta = writer.storage_meta()
    return metadata


def done(value: Any) -> Future:
    """A future that is over."""
    future: Future = Future()
    future.set_result(value)
    return future


def _nbytes(item: WriteItem) -> int:
    tensor = item.tensor_data
    return 0 if tensor is None else tensor.chunk.sizes.numel() * tensor.properties.dtype.itemsize
