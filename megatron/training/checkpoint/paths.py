"""Where checkpoints lie: `<root>/iter_0000010/`, and a file that names the latest complete one."""

import os
from pathlib import Path

from megatron.training.checkpoint.damage import damage

TRACKER = "latest_checkpointed_iteration.txt"
"""Names the latest iteration; written last, so that it never names half a checkpoint."""
RUN_CONFIG = "run_config.yaml"
"""The run's configuration, for people and for checks; `--yaml-cfg` reads it."""
RELEASE = "release"
"""What the tracker says of weights that were converted, not trained here."""


def iteration_folder(root: Path, iteration: int) -> Path:
    """The checkpoint of `iteration`."""
    return root / f"iter_{iteration:07d}"


def partial_folder(root: Path, iteration: int) -> Path:
    """Where it is written before it is complete; on the same file system, so that renaming is one step."""
    return root / f".iter_{iteration:07d}.partial"


def read_tracker(root: Path) -> int | str | None:
    """The latest iteration, or `RELEASE`; None if there is no checkpoint. Raises ValueError for other content."""
    path = root / TRACKER
    if not path.exists():
        return None
    text = path.read_text(encoding="utf-8").strip()
    if text == RELEASE:
        return RELEASE
    if not text.isdigit():
        raise ValueError(
            f"{path} should hold an iteration or {RELEASE!r}, not {text!r}; pass --ckpt-step to do without it"
        )
    return int(text)


def write_tracker(root: Path, iteration: int) -> None:
    """Makes `iteration` the latest, in one step."""
    partial = root / f".{TRACKER}.partial"
    partial.write_text(str(iteration), encoding="utf-8")
    os.replace(partial, root / TRACKER)


def folder_to_load(root: Path, step: int | None) -> Path | None:
    """The checkpoint of iteration `step`, or the latest one; None if there is none at all.

    Raises:
        ValueError: the one that is asked for is not there, or damaged, or nothing says which one is the latest.
    """
    wanted = read_tracker(root) if step is None else step
    if wanted is None:
        if there := sorted(path.name for path in root.glob("iter_*")):
            raise ValueError(
                f"{root} has no {TRACKER}, but {', '.join(there)}; pass --ckpt-step to choose an iteration "
                f"({complete_iterations(root)}), or another --load"
            )
        return None
    folder = root / RELEASE if wanted == RELEASE else iteration_folder(root, wanted)
    if not folder.exists():
        raise ValueError(f"{folder} does not exist; {complete_iterations(root)}")
    if problem := damage(folder):
        raise ValueError(damaged(folder, problem))
    return folder


def damaged(folder: Path, problem: str) -> str:
    """The sentence for a checkpoint that cannot be read, and what to do."""
    return (
        f"{folder} is no complete fsdp_dtensor checkpoint: {problem}; {complete_iterations(folder.parent, folder)}, "
        "which --ckpt-step chooses"
    )


def complete_iterations(root: Path, except_for: Path | None = None) -> str:
    """Which checkpoints below `root` can be read."""
    found = [path.name for path in sorted(root.glob("iter_*")) if path != except_for and damage(path) is None]
    return f"complete {'besides' if except_for else 'there'}: {', '.join(found) or 'none'}"
