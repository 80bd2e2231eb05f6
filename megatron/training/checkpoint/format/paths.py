"""Paths of checkpoints: `<root>/iter_0000010/`, and a tracker file that names the latest complete one."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.training.checkpoint.format.integrity import MANIFEST, find_damage
from megatron.training.checkpoint.format.metadata import METADATA

TRACKER = "latest_checkpointed_iteration.txt"
"""Names the latest iteration; written last, so that it never names half a checkpoint."""
TRACKER_PARTIAL = f".{TRACKER}.partial"
"""The same while it is being written."""
RUN_CONFIG = "run_config.yaml"
"""The run's configuration, for people and for checks; `--yaml-cfg` reads it."""
RELEASE = "release"
"""The tracker's word for weights that were converted, not trained here."""

PARTIAL, REPLACED, DELETED = "partial", "replaced", "deleted"
"""Kinds of hidden folders: being written; the one before of the same iteration; being deleted."""
_HIDDEN = re.compile(rf"\.iter_(\d{{7,}})(?:\.[0-9a-f]+)?\.({PARTIAL}|{REPLACED}|{DELETED})")
_COMPLETE = re.compile(r"iter_(\d{7,})")
_ITERATION = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, kw_only=True)
class Hidden:
    """A folder that is no checkpoint that anyone may see."""

    path: Path
    iteration: int
    kind: str
    """`PARTIAL`, `REPLACED` or `DELETED`."""


def iteration_folder(root: Path, iteration: int) -> Path:
    """The checkpoint of `iteration`."""
    return root / f"iter_{iteration:07d}"


def iteration_folders(root: Path) -> dict[int, Path]:
    """All of them by iteration, in order."""
    found = {path: _COMPLETE.fullmatch(path.name) for path in root.iterdir() if path.is_dir()}
    return dict(sorted((int(match[1]), path) for path, match in found.items() if match))


def hidden_folder(root: Path, iteration: int, token: str, kind: str) -> Path:
    """A hidden folder beside it; on the same file system, so that renaming is one step.

    `token` tells runs apart: what is left of one that was killed must not write into the folder of the next.
    """
    return root / f".iter_{iteration:07d}.{token}.{kind}"


def all_hidden(root: Path) -> Iterator[Hidden]:
    """The hidden folders in `root`, whoever made them."""
    for path in sorted(root.iterdir()):
        if (match := _HIDDEN.fullmatch(path.name)) and path.is_dir():
            yield Hidden(path=path, iteration=int(match[1]), kind=match[2])


def read_tracker(root: Path) -> int | str | None:
    """The latest iteration, or `RELEASE`; None if there is no checkpoint. Raises ValueError for other content."""
    path = root / TRACKER
    if not path.exists():
        return None
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    if text == RELEASE:
        return RELEASE
    if not _ITERATION.fullmatch(text):
        raise ValueError(
            f"{path} should hold an iteration or {RELEASE!r}, not {text[:40]!r}; pass --ckpt-step to do without it"
        )
    return int(text)


def folder_to_load(root: Path, step: int | None) -> Path | None:
    """The checkpoint of iteration `step`, or the latest one; None if there is none at all.

    The only one needs no tracker if it has a manifest: its run was killed right before it wrote the tracker.

    Raises:
        ValueError: the one that is asked for is not there, or damaged, or nothing says which one is the latest.
    """
    _refuse_what_holds_none(root)
    wanted = read_tracker(root) if step is None else step
    if wanted is None:
        there = sorted(root.glob("iter_*"))
        if not there:
            return None
        if len(there) > 1 or not (there[0] / MANIFEST).exists():
            raise ValueError(
                f"{root} has no {TRACKER}, but {', '.join(path.name for path in there)}; pass --ckpt-step to choose "
                f"an iteration ({complete_iterations(root)}), or another --load"
            )
    folder = there[0] if wanted is None else _folder_of(root, wanted)
    if not folder.exists():
        raise ValueError(f"{folder} does not exist; {complete_iterations(root)}, which --ckpt-step chooses")
    if problem := find_damage(folder):
        raise ValueError(damage_message(folder, problem))
    return folder


def _refuse_what_holds_none(root: Path) -> None:
    """Raises ValueError where no checkpoint can be below `root`: a run that starts anew there is not what is meant."""
    if root.exists() and not root.is_dir():
        raise ValueError(f"{root} is no folder; pass the one that --save has named, which holds {TRACKER}")
    if (root / TRACKER).exists():
        return
    if (root / METADATA).exists() or _COMPLETE.fullmatch(root.name):
        raise ValueError(
            f"{root} is the folder of one iteration; pass the one above, {root.parent}, and to load another than "
            "its latest --ckpt-step"
        )


def iteration_of(folder: Path) -> int | None:
    """The iteration that a checkpoint's folder is named after; None for weights without one."""
    match = _COMPLETE.fullmatch(folder.name)
    return int(match[1]) if match else None


def check_format(root: Path, step: int | None) -> None:
    """Raises ValueError if the checkpoint to load is of another of Megatron-LM's formats."""
    wanted = read_tracker(root) if step is None else step
    if wanted is None:
        return
    folder = _folder_of(root, wanted)
    kind = "torch_dist" if (folder / "metadata.json").exists() else "torch" if list(folder.glob("mp_rank_0*")) else None
    if kind is not None:
        raise ValueError(
            f"{folder} has the format {kind}, and only fsdp_dtensor can be read; convert it with Megatron-LM's "
            "tools/checkpoint/checkpoint_inspector.py, convert-torch-dist-to-fsdp-dtensor"
        )


def _folder_of(root: Path, wanted: int | str) -> Path:
    """The folder of one checkpoint: under its name, or beside it if a run was killed in the moment of replacing it."""
    folder = root / RELEASE if wanted == RELEASE else iteration_folder(root, wanted)
    if folder.exists() or not root.exists():
        return folder
    replaced = [each.path for each in all_hidden(root) if (each.kind, each.iteration) == (REPLACED, wanted)]
    return next(iter(replaced), folder)


def damage_message(folder: Path, problem: str) -> str:
    """The sentence for a checkpoint that cannot be read, and what to do."""
    return (
        f"{folder} is no complete fsdp_dtensor checkpoint: {problem}; {complete_iterations(folder.parent, folder)}, "
        "which --ckpt-step chooses"
    )


def complete_iterations(root: Path, except_for: Path | None = None) -> str:
    """The names of the checkpoints below `root` that can be read, for a message."""
    found = [path.name for path in sorted(root.glob("iter_*")) if path != except_for and find_damage(path) is None]
    return f"complete {'besides' if except_for else 'there'}: {', '.join(found) or 'none'}"
