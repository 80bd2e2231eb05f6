"""Compares the losses in a training log with recorded ones, iteration by iteration.

    python tests/functional_tests/compare_golden.py LOG --run tiny_fsdp
    python tests/functional_tests/compare_golden.py --show-flags tiny_fsdp    # what to run, on how many ranks

A recording (`golden/upstream_lm.json`) is Megatron-LM's own curve of the same flags. Exit code 0: within the tolerance.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden" / "upstream_lm.json"
RTOL = 2e-3
"""Between Megatron-LM's own engines 6e-4 were measured at iteration 20 in bf16."""
ITERATIONS = 20
"""Rounding grows with the iterations; later ones say little."""

_LINE = re.compile(r"\] iteration +(\d+)/ *\d+ \|.*?\| lm loss: (\S+) \|.*?\| grad norm: (\S+) \|")


@dataclass(frozen=True, kw_only=True)
class Step:
    """One iteration of a curve."""

    loss: float
    grad_norm: float


def read_log(text: str) -> dict[int, Step]:
    """The curve in a log, by iteration; other lines are passed over."""
    found = (_LINE.search(line) for line in text.splitlines())
    return {int(hit[1]): Step(loss=float(hit[2]), grad_norm=float(hit[3])) for hit in found if hit}


def read_golden(path: Path, run: str) -> dict[int, Step]:
    """The recorded curve called `run`."""
    recorded = json.loads(path.read_text(encoding="utf-8"))
    if run not in recorded["runs"]:
        raise ValueError(f"{path} has no run {run!r}; it has {', '.join(recorded['runs'])}")
    rows = [dict(zip(recorded["columns"], row, strict=True)) for row in recorded["runs"][run]]
    return {int(row["iteration"]): Step(loss=row["lm_loss"], grad_norm=row["grad_norm"]) for row in rows}


def deviation(step: Step, expected: Step) -> float:
    """Distance of the loss from the expected one, relative to it."""
    return abs(step.loss - expected.loss) / abs(expected.loss)


def problems(curve: Mapping[int, Step], golden: Mapping[int, Step], rtol: float, iterations: int) -> list[str]:
    """Sentences about all that is wrong with `curve` in the first `iterations`."""
    wrong = []
    for iteration, expected in sorted(golden.items()):
        if iteration > iterations:
            break
        if iteration not in curve:
            wrong.append(f"iteration {iteration} is missing")
            continue
        off = deviation(curve[iteration], expected)
        if math.isnan(off) or off > rtol:
            wrong.append(
                f"iteration {iteration}: lm loss {curve[iteration].loss:.6f}, expected {expected.loss:.6f}; "
                f"off by {off:.1e}, more than {rtol:.0e}"
            )
    return wrong


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0 if the log follows the recording."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("log", nargs="?", type=Path, help="what a run wrote to standard output")
    parser.add_argument("--run", default="tiny_fsdp", help="name of the recorded run [tiny_fsdp]")
    parser.add_argument("--golden", type=Path, default=GOLDEN, help=f"file of recordings [{GOLDEN.name}]")
    parser.add_argument("--rtol", type=float, default=RTOL, help=f"largest relative deviation [{RTOL}]")
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help=f"how many are compared [{ITERATIONS}]")
    parser.add_argument("--show-flags", metavar="RUN", help="write the flags of a recorded run and end")
    options = parser.parse_args(argv)
    if options.show_flags:
        recorded = json.loads(options.golden.read_text(encoding="utf-8"))
        sys.stdout.write(recorded["flags"][options.show_flags] + "\n")
        sys.stderr.write(f"on {recorded['ranks'][options.show_flags]} ranks\n")
        return 0
    if options.log is None:
        parser.error("LOG is missing")
    curve, golden = read_log(options.log.read_text(encoding="utf-8")), read_golden(options.golden, options.run)
    wrong = problems(curve, golden, options.rtol, options.iterations)
    both = [iteration for iteration in golden if iteration in curve and iteration <= options.iterations]
    most = max((deviation(curve[each], golden[each]) for each in both), default=math.nan)
    sys.stdout.write(
        "\n".join([*wrong, f"{options.run}: {len(both)} iterations compared, largest deviation {most:.1e}"])
    )
    sys.stdout.write("\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
