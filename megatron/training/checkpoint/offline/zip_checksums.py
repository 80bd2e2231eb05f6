"""Checksums in the zip files that torch.save writes, one for every record: checked, and corrected."""

import io
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from megatron.training.checkpoint.format.integrity import checksum_errors, find_damage, read_manifest
from megatron.training.checkpoint.format.metadata import read_metadata, stored_bytes


def content_errors(path: Path) -> Iterator[str]:
    """Changes in a checkpoint since it was written, be it a folder of one iteration or a file.

    Raises ValueError or OSError if its index cannot be read.
    """
    if path.is_file():
        with open(path, "rb") as stream:
            yield from _changed_records(stream, path.name)
    elif problem := find_damage(path):
        yield problem
    elif read_manifest(path) is not None:
        yield from checksum_errors(path, 0, 1)
    else:
        metadata = read_metadata(path)
        for index in metadata.storage_data:
            yield from _changed_records(io.BytesIO(stored_bytes(path, metadata, index)), index.fqn)


def _changed_records(stream: BinaryIO, name: str) -> Iterator[str]:
    try:
        with zipfile.ZipFile(stream) as archive:
            changed = archive.testzip()
    except Exception as error:  # noqa: BLE001  (damaged bytes can raise anything)
        yield f"{name} is no whole file of torch.save ({error})"
        return
    if changed is not None:
        yield f"{name} is not what was written (the checksum of {changed} in it differs)"


_CENTRAL = struct.Struct("<4s12xI8xHHH8xI")
"""Of an entry of a zip file's directory: signature, checksum, lengths of name, extra and comment, and its place."""
_CENTRAL_SIZE, _CHECKSUM_AT, _LOCAL_CHECKSUM_AT = 46, 16, 14


def correct_checksums(path: Path) -> None:
    """Writes the checksums of a zip file whose records were changed in place."""
    with zipfile.ZipFile(path) as archive:
        records, start = archive.infolist(), archive.start_dir
    with open(path, "r+b") as stream:
        for record in records:
            stream.seek(record.header_offset + 26)
            name_length, extra_length = struct.unpack("<HH", stream.read(4))
            stream.seek(record.header_offset + 30 + name_length + extra_length)
            checksum = _checksum(stream, record.file_size)
            stream.seek(record.header_offset + _LOCAL_CHECKSUM_AT)
            stream.write(struct.pack("<I", checksum))
            stream.seek(start + _CHECKSUM_AT)
            stream.write(struct.pack("<I", checksum))
            stream.seek(start)
            _, _, *lengths, _ = _CENTRAL.unpack(stream.read(_CENTRAL_SIZE))
            start += _CENTRAL_SIZE + sum(lengths)


def _checksum(stream: BinaryIO, size: int) -> int:
    checksum = 0
    while size:
        block = stream.read(min(size, 1 << 24))
        checksum, size = zlib.crc32(block, checksum), size - len(block)
    return checksum
