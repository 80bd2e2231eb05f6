"""Integrity of a checkpoint's files: the manifest with their sizes and checksums, and what differs from it."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch.distributed.checkpoint import CheckpointException

from megatron.training.checkpoint.format.filesystem import ALGORITHM, FileDigest, digest_of
from megatron.training.checkpoint.format.metadata import METADATA, read_metadata
from megatron.training.checkpoint.format.thread_pool import even_parts, in_threads

MANIFEST = "manifest.json"
"""Lists every file of a checkpoint with its size and checksum; written last before the checkpoint is published."""
_VERSION = 1

_MOST_NAMED = 8
"""Files that a message names."""


def manifest_bytes(files: Mapping[str, FileDigest]) -> bytes:
    """The file's content: JSON, with a checksum of its own over the rest."""
    listed = {name: {"bytes": digest.nbytes, ALGORITHM: digest.checksum} for name, digest in sorted(files.items())}
    document = {"version": _VERSION, "algorithm": ALGORITHM, "files": listed, "checksum": _own_checksum(listed)}
    return (json.dumps(document, indent=1) + "\n").encode()


def _parse_manifest(data: bytes) -> dict[str, FileDigest]:
    """The files that `manifest_bytes` listed. Raises ValueError if it is anything else."""
    try:
        document = json.loads(data)
        version, listed, checksum = document["version"], document["files"], document["checksum"]
        files = {name: FileDigest(nbytes=entry["bytes"], checksum=entry[ALGORITHM]) for name, entry in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{MANIFEST} cannot be read ({type(error).__name__}: {error})") from error
    if version != _VERSION:
        raise ValueError(f"{MANIFEST} has version {version}, expected {_VERSION}")
    if outside := [name for name in files if Path(name).name != name or name == ".."]:
        raise ValueError(f"{MANIFEST} names the file {outside[0]!r}, which is not in the checkpoint")
    if checksum != _own_checksum(listed):
        raise ValueError(f"{MANIFEST} was changed after it was written")
    return files


def read_manifest(folder: Path) -> dict[str, FileDigest] | None:
    """The files of the checkpoint in `folder`; None if it has no manifest. Raises ValueError if it is damaged."""
    path = folder / MANIFEST
    return _parse_manifest(path.read_bytes()) if path.exists() else None


def _own_checksum(listed: Mapping[str, object]) -> str:
    return hashlib.new(ALGORITHM, json.dumps(listed, sort_keys=True).encode()).hexdigest()


def find_damage(folder: Path) -> str | None:
    """The damage that names and sizes of a checkpoint's files show, as a sentence; None if they show none."""
    try:
        files = read_manifest(folder)
    except (OSError, ValueError) as error:
        return str(error)
    return summarized(list(_differences(folder, files))) if files is not None else _shorter_than_its_metadata(folder)


def _differences(folder: Path, files: dict[str, FileDigest]) -> Iterator[str]:
    """Files that are not as the manifest says."""
    for name, digest in files.items():
        path = folder / name
        if not path.exists():
            yield f"{name} is missing"
        elif (nbytes := path.stat().st_size) != digest.nbytes:
            yield f"{name} has {nbytes} of {digest.nbytes} bytes"
    known = {*files, MANIFEST}
    # Hidden files are the operating system's, as those of NFS.
    there = (path.name for path in folder.iterdir() if not path.name.startswith("."))
    yield from (f"{name} does not belong to it" for name in sorted(there) if name not in known)


def _shorter_than_its_metadata(folder: Path) -> str | None:
    """The damage of a checkpoint without a manifest: Megatron-LM's, or one from before there were any."""
    if not (folder / METADATA).exists():
        return f"{METADATA} is missing"
    try:
        storage = read_metadata(folder).storage_data
    except (ValueError, OSError) as error:
        return str(error)
    ends: dict[str, int] = {}
    for piece in storage.values():
        ends[piece.relative_path] = max(ends.get(piece.relative_path, 0), piece.offset + piece.length)
    for name, end in sorted(ends.items()):
        file = folder / name
        if not file.exists():
            return f"{name} is missing"
        if file.stat().st_size < end:
            return f"{name} has {file.stat().st_size} of {end} bytes"
    return None


def checksum_errors(folder: Path, rank: int, world_size: int) -> list[str]:
    """Files of this rank's share whose content is not what was written; empty if there is no manifest."""
    files = read_manifest(folder)
    if files is None:
        return []
    names = even_parts(sorted(files), world_size, lambda name: files[name].nbytes)[rank]
    return [problem for problem in in_threads(lambda name: _change(folder / name, files[name]), names) if problem]


def _change(path: Path, expected: FileDigest) -> str | None:
    try:
        is_same = digest_of(path) == expected
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    return None if is_same else f"{path.name} is not what was written (its checksum differs)"


def summarized(problems: Sequence[str]) -> str | None:
    """The first of several problems, and how many more there are; None if there is none."""
    more = len(problems) - _MOST_NAMED
    return ", ".join([*problems[:_MOST_NAMED], *([f"and {more} more"] if more > 0 else [])]) or None


def read_error(error: CheckpointException) -> str:
    """The reason of a read that failed on this rank, in one line."""
    ((reason, _),) = error.failures.values()
    lines = str(reason).strip().splitlines()
    return f"cannot read it ({type(reason).__name__}: {lines[0] if lines else 'no message'})"
