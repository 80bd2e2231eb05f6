"""The file operations that saving is made of, one method each, so that a test can stop between any two of them."""

import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

ALGORITHM = "sha256"
"""The hash of checksums: processors have instructions for it, and `sha256sum` checks it without us."""
_PIECE_NBYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class FileDigest:
    """Size and checksum of a file."""

    nbytes: int
    checksum: str
    """Of its content, in hexadecimal digits."""


class Disk:
    """Folders and files, each operation alone. Raises OSError."""

    def make_folder(self, path: Path) -> None:
        """Makes a folder that is not there."""
        path.mkdir()

    def create(self, path: Path) -> BinaryIO:
        """An empty file to write to; what is there by that name is lost."""
        return path.open("wb")

    def write(self, stream: BinaryIO, data: bytes | memoryview) -> None:
        """Appends to the file."""
        stream.write(data)

    def sync(self, stream: BinaryIO) -> None:
        """Returns when the file's content would survive a loss of power."""
        stream.flush()
        os.fsync(stream.fileno())

    def sync_folder(self, path: Path) -> None:
        """Returns when the names in a folder would survive a loss of power."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Moves a file or a folder in one step; a file that is there is replaced."""
        os.replace(source, target)

    def delete_file(self, path: Path) -> None:
        """Deletes a file."""
        path.unlink()

    def delete_folder(self, path: Path) -> None:
        """Deletes an empty folder."""
        path.rmdir()


class ChecksummedFile:
    """A file that is being written; its size and checksum are known once it is closed."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk, self._stream = disk, disk.create(path)
        self._hash, self._nbytes = hashlib.new(ALGORITHM), 0
        self._digest: FileDigest | None = None
        self.error: OSError | None = None
        """The system's error, if a write failed; torch's writer replaces it by one of its own."""

    def write(self, data: bytes | memoryview) -> int:
        """Appends `data`; its number of bytes."""
        data = memoryview(data).cast("B")
        # In pieces, which are still in the processor's caches when they are written after they were summed.
        for start in range(0, len(data), _PIECE_NBYTES):
            piece = data[start : start + _PIECE_NBYTES]
            self._hash.update(piece)
            self._write(piece)
        self._nbytes += len(data)
        return len(data)

    def _write(self, piece: memoryview) -> None:
        try:
            self._disk.write(self._stream, piece)
        except OSError as error:
            self.error = self.error or error
            raise

    def tell(self) -> int:
        """Bytes written so far."""
        return self._nbytes

    def flush(self) -> None:
        """Nothing: `close` does."""

    def close(self) -> FileDigest:
        """Returns when the file is safe on the disk; once more, and it only answers."""
        if self._digest is None:
            with self._stream:
                self._disk.sync(self._stream)
            self._digest = FileDigest(nbytes=self._nbytes, checksum=self._hash.hexdigest())
        return self._digest

    def discard(self) -> None:
        """Closes a file that is of no use any more."""
        with contextlib.suppress(OSError):
            self._stream.close()


def write_file(disk: Disk, path: Path, data: bytes) -> FileDigest:
    """Writes a whole file and makes it safe."""
    file = ChecksummedFile(disk, path)
    try:
        file.write(data)
        return file.close()
    except OSError:
        file.discard()
        raise


def digest_of(path: Path) -> FileDigest:
    """Size and checksum of a file that is there."""
    total, nbytes = hashlib.new(ALGORITHM), 0
    with path.open("rb", buffering=0) as stream:
        piece = memoryview(bytearray(_PIECE_NBYTES))
        while count := stream.readinto(piece):
            total.update(piece[:count])
            nbytes += count
    return FileDigest(nbytes=nbytes, checksum=total.hexdigest())


def delete_tree(disk: Disk, folder: Path) -> None:
    """Deletes a folder with all that is in it."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            delete_tree(disk, path)
        else:
            disk.delete_file(path)
    disk.delete_folder(folder)
