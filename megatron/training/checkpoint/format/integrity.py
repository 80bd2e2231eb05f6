"""Telling a checkpoint that was damaged after it was written, before a run reads it."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch.distributed.checkpoint import CheckpointException

from megatron.training.checkpoint.format import manifest
from megatron.training.checkpoint.format.filesystem import FileFacts, facts_of
from megatron.training.checkpoint.format.safe_unpickle import read_metadata

_MOST_THREADS = 8
"""Of one rank that reads files for their checksums."""
_MOST_TOLD = 8
"""Files that a message names."""


def damage(folder: Path) -> str | None:
    """What is wrong with the files of a checkpoint, judged by their names and sizes; None if nothing is."""
    try:
        files = manifest.read(folder)
    except (OSError, ValueError) as error:
        return str(error)
    return in_words(list(_differences(folder, files))) if files is not None else _shorter_than_its_metadata(folder)


def _differences(folder: Path, files: dict[str, FileFacts]) -> Iterator[str]:
    """Files that are not as the manifest says."""
    for name, facts in files.items():
        path = folder / name
        if not path.exists():
            yield f"{name} is missing"
        elif (nbytes := path.stat().st_size) != facts.nbytes:
            yield f"{name} has {nbytes} of {facts.nbytes} bytes"
    known = {*files, manifest.MANIFEST}
    # Hidden files are the operating system's, as those of NFS.
    there = (path.name for path in folder.iterdir() if not path.name.startswith("."))
    yield from (f"{name} does not belong to it" for name in sorted(there) if name not in known)


def _shorter_than_its_metadata(folder: Path) -> str | None:
    """The damage of a checkpoint without a manifest: Megatron-LM's, or one from before there were any."""
    metadata = folder / ".metadata"
    if not metadata.exists():
        return f"{metadata.name} is missing"
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


def changed_files(folder: Path, rank: int, world_size: int) -> list[str]:
    """What is wrong with the content of this rank's share of the files; nothing if there is no manifest."""
    files = manifest.read(folder)
    names = [] if files is None else share(files, rank, world_size)
    if not names:
        return []
    with ThreadPoolExecutor(min(len(names), _MOST_THREADS)) as threads:
        found = threads.map(lambda name: _change(folder / name, files[name]), names)
    return [problem for problem in found if problem is not None]


def share(files: dict[str, FileFacts], rank: int, world_size: int) -> list[str]:
    """The names of the files that `rank` is to read, so that all read about as much."""
    loads, mine = [0] * world_size, []
    for name in sorted(files, key=lambda name: (-files[name].nbytes, name)):
        least = loads.index(min(loads))
        loads[least] += files[name].nbytes + 1
        if least == rank:
            mine.append(name)
    return mine


def _change(path: Path, expected: FileFacts) -> str | None:
    try:
        is_same = facts_of(path) == expected
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    return None if is_same else f"{path.name} is not what was written (its checksum differs)"


def in_words(problems: Sequence[str]) -> str | None:
    """The first of several problems, and how many more there are; None if there is none."""
    more = len(problems) - _MOST_TOLD
    return ", ".join([*problems[:_MOST_TOLD], *([f"and {more} more"] if more > 0 else [])]) or None


def what_failed(error: CheckpointException) -> str:
    """The reason of a read that failed on this rank, in one line."""
    ((reason, _),) = error.failures.values()
    lines = str(reason).strip().splitlines()
    return f"cannot read it ({type(reason).__name__}: {lines[0] if lines else 'no message'})"
