"""Writing a rank's files of a checkpoint: torch's format, each file safe on the disk and summed while it is written."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter, Metadata
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron.training.checkpoint.disk import ChecksummedFile, Disk, FileFacts

_MOST_FILES = 8
_FILE_NBYTES = 256 << 20
"""A rank that writes more takes another file, and with it another thread."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """What one rank has written."""

    results: list[WriteResult]
    """Where each piece lies."""
    files: dict[str, FileFacts]
    """By name, without the folder."""


class SafeFiles(FileSystem):
    """Files that count only once they are closed: then they are on the disk and their checksums known."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.files: dict[str, FileFacts] = {}
        """Those that are closed."""
        self.errors: list[OSError] = []
        """Why the others are not. torch loses the errors of its threads."""

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


class FilesWriter(FileSystemWriter):
    """Writes the files of a plan into `folder`, and keeps what rank 0 needs to describe them."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        super().__init__(folder, sync_files=False)  # Closing a file does.
        self.fs = self._files = SafeFiles(disk)
        self.written: Written | None = None
        """This rank's files, once they are written."""
        self.metadata: Metadata | None = None
        """On rank 0, what all ranks' files hold."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        """Writes this rank's files, in as many threads as files. Raises OSError if one could not be written."""
        self.thread_count = min(_MOST_FILES, 1 + nbytes_of(plan) // _FILE_NBYTES)
        try:
            results = super().write_data(plan, planner).wait()
        except Exception as error:
            # What torch makes of a failed write says less.
            raise (self._files.errors or [error])[0] from error
        if self._files.errors:
            raise self._files.errors[0]
        if len(results) != len(plan.items):
            raise OSError(f"{len(results)} of {len(plan.items)} pieces were written to {self.path}")
        self.written = Written(results=results, files=self._files.files)
        return done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Keeps the plan of all files; `described` makes the file of it."""
        self.metadata = metadata


def described(writer: FileSystemWriter, metadata: Metadata, written: list[Written]) -> Metadata:
    """`metadata` with the places of all pieces."""
    metadata.storage_data = {result.index: result.storage_data for rank in written for result in rank.results}
    metadata.storage_meta = writer.storage_meta()
    return metadata


def done(value: Any) -> Future:
    """A future that is over."""
    future: Future = Future()
    future.set_result(value)
    return future


def nbytes_of(plan: SavePlan) -> int:
    """The size of a plan's tensors on this rank."""
    tensors = (item.tensor_data for item in plan.items if item.tensor_data is not None)
    return sum(tensor.chunk.sizes.numel() * tensor.properties.dtype.itemsize for tensor in tensors)
