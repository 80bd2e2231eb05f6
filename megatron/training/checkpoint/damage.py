"""Telling a checkpoint that was damaged after it was written, before a run reads it."""

from pathlib import Path

from torch.distributed.checkpoint import CheckpointException, FileSystemReader


def damage(folder: Path) -> str | None:
    """What is wrong with the files of a checkpoint, judged by their sizes; None if nothing is."""
    metadata = folder / ".metadata"
    if not metadata.exists():
        return f"{metadata.name} is missing"
    try:
        storage = FileSystemReader(str(folder)).read_metadata().storage_data
    except Exception as error:  # noqa: BLE001  (unpickling damaged bytes can raise anything)
        return f"{metadata.name} cannot be read ({error!r})"
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


def what_failed(error: CheckpointException) -> str:
    """The first reason of a read that failed on some rank, in one line."""
    rank, (reason, _) = min(error.failures.items())
    lines = str(reason).strip().splitlines()
    return f"rank {rank} cannot read it ({type(reason).__name__}: {lines[0] if lines else 'no message'})"
