"""Checksums that torch's own files carry: each is a zip file, with one for every record."""

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from megatron.training.checkpoint.format import manifest
from megatron.training.checkpoint.format.integrity import changed_files, damage
from megatron.training.checkpoint.format.safe_unpickle import read_metadata, stored_bytes


def damage_of_content(path: Path) -> Iterator[str]:
    """What was changed in a checkpoint since it was written, be it a folder of one iteration or a file.

    Raises ValueError or OSError if its index cannot be read.
    """
    if path.is_file():
        with open(path, "rb") as stream:
            yield from _changed_records(stream, path.name)
    elif problem := damage(path):
        yield problem
    elif manifest.read(path) is not None:
        yield from changed_files(path, 0, 1)
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
