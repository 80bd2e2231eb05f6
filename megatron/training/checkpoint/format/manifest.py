"""What a checkpoint's folder must hold: every file with its size and checksum, written last before it is published."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from megatron.training.checkpoint.format.filesystem import ALGORITHM, FileFacts

MANIFEST = "manifest.json"
"""Its file's name."""
_VERSION = 1


def to_bytes(files: Mapping[str, FileFacts]) -> bytes:
    """The file's content: JSON, with a checksum of its own over the rest."""
    listed = {name: {"bytes": facts.nbytes, ALGORITHM: facts.checksum} for name, facts in sorted(files.items())}
    document = {"version": _VERSION, "algorithm": ALGORITHM, "files": listed, "checksum": _own_checksum(listed)}
    return (json.dumps(document, indent=1) + "\n").encode()


def from_bytes(data: bytes) -> dict[str, FileFacts]:
    """The files that `to_bytes` listed. Raises ValueError if it is anything else."""
    try:
        document = json.loads(data)
        version, listed, checksum = document["version"], document["files"], document["checksum"]
        files = {name: FileFacts(nbytes=entry["bytes"], checksum=entry[ALGORITHM]) for name, entry in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{MANIFEST} cannot be read ({type(error).__name__}: {error})") from error
    if version != _VERSION:
        raise ValueError(f"{MANIFEST} has version {version}, expected {_VERSION}")
    if outside := [name for name in files if Path(name).name != name or name == ".."]:
        raise ValueError(f"{MANIFEST} names the file {outside[0]!r}, which is not in the checkpoint")
    if checksum != _own_checksum(listed):
        raise ValueError(f"{MANIFEST} was changed after it was written")
    return files


def read(folder: Path) -> dict[str, FileFacts] | None:
    """The files of the checkpoint in `folder`; None if it has no manifest. Raises ValueError if it is damaged."""
    path = folder / MANIFEST
    return from_bytes(path.read_bytes()) if path.exists() else None


def _own_checksum(listed: Mapping[str, object]) -> str:
    return hashlib.new(ALGORITHM, json.dumps(listed, sort_keys=True).encode()).hexdigest()
