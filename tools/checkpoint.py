"""Looks into checkpoints, checks and compares them, and converts between a folder and one file; needs no GPU.

    python tools/checkpoint.py inspect checkpoints
    python tools/checkpoint.py verify checkpoints
    python tools/checkpoint.py diff checkpoints model.pt --only model.
    python tools/checkpoint.py convert checkpoints model.pt --to torch

A checkpoint is a file that torch.save wrote, a folder of one iteration, or the folder that --save names: then it is the
latest, or that of --step.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.training.checkpoint.format.integrity import MANIFEST, summarized
from megatron.training.checkpoint.offline.compare import compare_entries
from megatron.training.checkpoint.offline.key_mapping import to_megatron_lm, to_plain, to_stored
from megatron.training.checkpoint.offline.lazy_reader import ARGUMENTS, Entry, Source, checkpoint_folder, open_source
from megatron.training.checkpoint.offline.writer import write_file, write_folder
from megatron.training.checkpoint.offline.zip_checksums import content_errors

_EXIT_BROKEN_PIPE = 141
"""128 and the number of SIGPIPE, as shells count."""


class _Progress:
    """Bytes done of all, on a terminal."""

    def __init__(self, source: Source):
        self._total = sum(value.nbytes for value in source.values() if isinstance(value, Entry)) or 1
        self._done = 0

    def __call__(self, name: str, nbytes: int) -> None:
        self._done += nbytes
        if sys.stderr.isatty():
            share = f"{100 * self._done / self._total:3.0f} % of {self._total / 1e9:.2f} GB"
            sys.stderr.write(f"\r\x1b[K{share} {name[:80]}")
            sys.stderr.flush()

    def end(self) -> None:
        """Leaves the line."""
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")


def inspect(options: argparse.Namespace) -> int:
    """Prints what there is."""
    source = open_source(options.checkpoint, options.step)
    tensors = {name: value for name, value in sorted(source.items()) if isinstance(value, Entry)}
    arguments = vars(source[ARGUMENTS]) if ARGUMENTS in source else {}
    values = {name: value for name, value in sorted(source.items()) if name not in tensors and name != ARGUMENTS}
    if options.json:
        described = {name: {"shape": list(each.shape), "dtype": _dtype(each)} for name, each in tensors.items()}
        report = {"iteration": source.get("iteration"), "tensors": described, "values": values, "arguments": arguments}
        print(json.dumps(report, indent=1, default=str))
        return 0
    for name, each in tensors.items():
        print(f"{name}  {tuple(each.shape)}  {_dtype(each)}")
    if options.values:
        for name, value in values.items():
            print(f"{name} = {_short(value)}")
        for name, value in sorted(arguments.items()):
            print(f"args.{name} = {_short(value)}")
    numel = sum(math.prod(each.shape) for name, each in tensors.items() if name.startswith("model."))
    nbytes = sum(each.nbytes for each in tensors.values())
    print(
        f"iteration {source.get('iteration', 'unknown')}: {len(tensors)} tensors of {nbytes / 1e9:.3f} GB, "
        f"{numel:,} elements in the model, {len(values)} values, {len(arguments)} arguments"
        + ("" if options.values else " (--values shows them)")
    )
    return 0


def _dtype(entry: Entry) -> str:
    return str(entry.dtype).removeprefix("torch.")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def verify(options: argparse.Namespace) -> int:
    """Says whether the files are whole and every tensor can be read."""
    where = _checked(options)
    source = open_source(options.checkpoint, options.step)
    progress = _Progress(source)
    for name, value in source.items():
        if isinstance(value, Entry):
            tensor = value.read()
            if tensor.shape != value.shape or tensor.dtype != value.dtype:
                raise ValueError(
                    f"{name} is {tuple(tensor.shape)} {tensor.dtype}, not {tuple(value.shape)} {value.dtype}"
                )
            progress(name, value.nbytes)
    progress.end()
    count = sum(isinstance(value, Entry) for value in source.values())
    by_torch = "" if (where / MANIFEST).exists() else " as far as torch's own checksums tell"
    print(f"{options.checkpoint}: whole{by_torch}, {count} tensors can be read")
    return 0


def _checked(options: argparse.Namespace) -> Path:
    """The file or folder that is meant. ValueError if it was changed since it was written."""
    where = options.checkpoint
    if not where.is_file():
        where = checkpoint_folder(where, options.step)
    if problem := summarized(list(content_errors(where))):
        raise ValueError(f"{where}: {problem}")
    return where


def diff(options: argparse.Namespace) -> int:
    """Prints how two checkpoints differ; 1 if they do."""
    one, other = (to_plain(open_source(path)) for path in (options.checkpoint, options.other))
    found = compare_entries(one, other, rtol=options.rtol, atol=options.atol, only=options.only)
    for line in found.lines:
        print(line)
    print(f"{found.equal} equal, {len(found.lines)} different")
    return 1 if found.lines else 0


def convert(options: argparse.Namespace) -> int:
    """Writes a checkpoint in another form."""
    if options.verify_checksums:
        _checked(options)
    source = open_source(options.checkpoint, options.step)
    if options.to == "torch":
        plain = to_plain(source)
        progress = _Progress(plain)
        write_file(plain, options.output, progress)
        written = options.output
    else:
        form = to_megatron_lm if options.to == "megatron-lm" else to_stored
        stored = form(source, is_gated=options.swiglu)
        progress = _Progress(stored)
        written = write_folder(stored, options.output, progress)
    progress.end()
    print(f"wrote {written}")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="checkpoint", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(function, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(function.__name__, help=text, description=text)
        made.set_defaults(function=function)
        made.add_argument("checkpoint", type=Path)
        return made

    shown = command(inspect, "list tensors, shapes, dtypes, iteration and arguments")
    shown.add_argument("--json", action="store_true", help="everything, as JSON")
    shown.add_argument("--values", action="store_true", help="also values that are no tensors, and arguments")
    verified = command(verify, "check that a checkpoint is whole, and read every tensor")
    compared = command(diff, "compare two checkpoints of any form; exit code 1 if they differ")
    compared.add_argument("other", type=Path)
    compared.add_argument("--rtol", type=float, default=0.0, help="relative tolerance (default: %(default)s)")
    compared.add_argument("--atol", type=float, default=0.0, help="absolute tolerance (default: %(default)s)")
    compared.add_argument("--only", default="", metavar="PREFIX", help="names that begin so, such as model.")
    converted = command(convert, "write a checkpoint in another form; the output must not exist yet")
    converted.add_argument("output", type=Path, help="a file for torch, else the folder that --load will name")
    converted.add_argument("--to", required=True, choices=("torch", "fsdp_dtensor", "megatron-lm"))
    converted.add_argument(
        "--swiglu", action="store_true", help="the model's MLPs are gated (--swiglu); only for a state dict of others"
    )
    converted.add_argument(
        "--no-verify-checksums",
        dest="verify_checksums",
        action="store_false",
        help="do not read all files once more before, to refuse what was damaged",
    )
    for each in (shown, verified, converted):
        each.add_argument("--step", type=int, help="this iteration, not the latest")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; 0 if all is well, 1 if checkpoints differ, 2 if one cannot be read or written."""
    options = parser().parse_args(argv)
    try:
        code = options.function(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # As of `| head`: who reads has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends.
        return _EXIT_BROKEN_PIPE
    except (ValueError, OSError) as error:
        said = str(error).replace("--ckpt-step", "--step")  # the training loop's flag for the same
        print(f"checkpoint: error: {said}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
