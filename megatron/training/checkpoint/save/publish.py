"""Publication of a checkpoint: hidden while it is incomplete, renamed once, named by the tracker last; and deletion.

All of it happens on rank 0 alone, as operations of a `Disk`. Wherever they break off, what the tracker names is whole.
"""

import contextlib
import fcntl
import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron.training.checkpoint.format.filesystem import Disk, FileDigest, delete_tree, write_file
from megatron.training.checkpoint.format.integrity import MANIFEST, find_damage, manifest_bytes
from megatron.training.checkpoint.format.paths import (
    DELETED,
    PARTIAL,
    REPLACED,
    TRACKER,
    TRACKER_PARTIAL,
    Hidden,
    all_hidden,
    hidden_folder,
    iteration_folder,
    iteration_folders,
)

logger = logging.getLogger(__name__)

_ABANDONED_AFTER_S = 3600
"""On a file system without locks: time without a write after which a partial checkpoint counts as abandoned."""


@dataclass(frozen=True, kw_only=True)
class Partial:
    """A checkpoint that is being written; locked until `release`, so that no other run takes it for a remnant."""

    root: Path
    iteration: int
    folder: Path
    lock: int
    """The descriptor that holds the lock, which ends with the process however that ends."""

    def release(self) -> None:
        """Gives up the lock."""
        os.close(self.lock)


def begin(disk: Disk, root: Path, iteration: int) -> Partial:
    """Deletes what interrupted runs left in `root`, and makes an empty hidden folder for a new checkpoint."""
    with _one_at_a_time(root):
        clear_remnants(disk, root)
        folder = hidden_folder(root, iteration, secrets.token_hex(4), PARTIAL)
        disk.make_folder(folder)
        descriptor = os.open(folder, os.O_RDONLY)  # Before another run can take it for a remnant.
        with contextlib.suppress(OSError):  # Not every file system has locks.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return Partial(root=root, iteration=iteration, folder=folder, lock=descriptor)


def publish(disk: Disk, partial: Partial, written: Mapping[str, FileDigest], texts: Mapping[str, bytes]) -> Path:
    """Makes a checkpoint whose files are `written` the latest, with small files `texts` added; its folder.

    Raises:
        OSError: it could not be written whole; nothing was published.
    """
    root, folder = partial.root, iteration_folder(partial.root, partial.iteration)
    files = dict(written)
    for name, data in texts.items():
        files[name] = write_file(disk, partial.folder / name, data)
    write_file(disk, partial.folder / MANIFEST, manifest_bytes(files))
    if problem := find_damage(partial.folder):
        raise OSError(f"{partial.folder} is not what was written to it: {problem}")
    disk.sync_folder(partial.folder)
    with _one_at_a_time(root):
        replaced = hidden_folder(root, partial.iteration, secrets.token_hex(4), REPLACED) if folder.exists() else None
        if replaced is not None:
            disk.rename(folder, replaced)  # Until the next rename, loading finds it by its hidden name.
        disk.rename(partial.folder, folder)
        disk.sync_folder(root)
        write_tracker(disk, root, partial.iteration)
        marked = None if replaced is None else _marked_deleted(disk, replaced, root, partial.iteration)
    if marked is not None:
        _delete(disk, marked)
    return folder


@contextlib.contextmanager
def _one_at_a_time(root: Path) -> Iterator[None]:
    """Inside, no other run that saves to `root` renames anything there, nor finds anything between two renames."""
    descriptor = os.open(root, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # Not every file system has locks.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write_tracker(disk: Disk, root: Path, iteration: int) -> None:
    """Makes `iteration` the latest, in one step."""
    write_file(disk, root / TRACKER_PARTIAL, str(iteration).encode())
    disk.rename(root / TRACKER_PARTIAL, root / TRACKER)
    disk.sync_folder(root)


def retain(disk: Disk, root: Path, interval: int, latest: int) -> list[int]:
    """Deletes checkpoints older than `latest` whose iteration `interval` does not divide; their iterations."""
    with _one_at_a_time(root):
        superseded = {at: path for at, path in iteration_folders(root).items() if at < latest and at % interval}
        marked = [_marked_deleted(disk, folder, root, iteration) for iteration, folder in superseded.items()]
    if marked:
        disk.sync_folder(root)
    for folder in marked:
        _delete(disk, folder)
    return list(superseded)


def discard(disk: Disk, partial: Partial) -> None:
    """Deletes a checkpoint that could not be written, as far as that is possible."""
    with contextlib.suppress(OSError):
        delete_tree(disk, partial.folder)


def clear_remnants(disk: Disk, root: Path) -> None:
    """Deletes what interrupted saves left in `root`, but nothing that a living run writes."""
    for hidden in all_hidden(root):
        target = iteration_folder(root, hidden.iteration)
        if hidden.kind == REPLACED and not target.exists():
            disk.rename(hidden.path, target)  # Replacing it was interrupted.
        elif hidden.kind == REPLACED:
            _delete(disk, _marked_deleted(disk, hidden.path, root, hidden.iteration))
        elif hidden.kind == DELETED or _is_abandoned(hidden):
            _delete(disk, hidden.path)
        else:
            logger.warning("%s is left alone: another run is writing it", hidden.path)


def _marked_deleted(disk: Disk, folder: Path, root: Path, iteration: int) -> Path:
    """Gives a checkpoint the name of what is to be deleted, so that nobody takes a part of it for a whole."""
    marked = hidden_folder(root, iteration, secrets.token_hex(4), DELETED)
    disk.rename(folder, marked)
    return marked


def _delete(disk: Disk, folder: Path) -> None:
    """Deletes a hidden folder; what is left of it hurts nobody, and the next save tries again."""
    try:
        if folder.is_dir() and not folder.is_symlink():
            delete_tree(disk, folder)
        else:  # A file or a link in the place of a checkpoint.
            disk.delete_file(folder)
    except FileNotFoundError:  # another run, whose save tidied up at the same time, has
        return
    except OSError as error:
        logger.warning("%s cannot be deleted (%s); delete it when no run writes to it", folder, error.strerror)


def _is_abandoned(hidden: Hidden) -> bool:
    """True if no process writes it any more."""
    descriptor = os.open(hidden.path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        touched_s = max(path.stat().st_mtime for path in (hidden.path, *hidden.path.iterdir()))
        return time.time() - touched_s > _ABANDONED_AFTER_S
    finally:
        os.close(descriptor)
    return True
