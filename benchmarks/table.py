"""Measures rows of the table in docs/performance.md: engines side by side, one after the other on the same GPUs.

    python benchmarks/table.py --gpus 4 --out benchmarks/results            # every row
    python benchmarks/table.py --gpus 4 --rows 8b-bf16 1b-bf16 --engines ours fsdp2 nocomm
    python benchmarks/table.py --pretend-ranks 8                            # on one GPU: memory and host time as on 8
    python benchmarks/table.py --show benchmarks/results                    # what has been measured, as Markdown

Every row becomes one JSON file: the results as `fsdp_bench.py` prints them, versions, GPU, commands. `mfsdp` needs the
package megatron-fsdp in a folder of its own, since it has our import name: --peer-path.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
ENGINE_SOURCE = ROOT / "megatron/core/distributed/fsdp/src"

#: Workloads: what `fsdp_bench.py` is told about them.
ROWS = {
    "8b-bf16": ("--size", "8b", "--seq", "4096", "--grad-comm", "bf16"),
    "8b-fp32": ("--size", "8b", "--seq", "4096", "--grad-comm", "fp32"),
    "8b-bf16-accum4": ("--size", "8b", "--seq", "4096", "--grad-comm", "bf16", "--accum", "4"),
    "8b-seq1024-bf16": ("--size", "8b", "--seq", "1024", "--grad-comm", "bf16"),
    "8b-seq1024-fp32": ("--size", "8b", "--seq", "1024", "--grad-comm", "fp32"),
    "3b-bf16": ("--size", "3b", "--seq", "4096", "--grad-comm", "bf16"),
    "1b-bf16": ("--size", "1b", "--seq", "2048", "--grad-comm", "bf16"),
}
#: Engines: what `fsdp_bench.py` is told about them.
ENGINES = {
    "nocomm": ("--engine", "nocomm"),
    "ddp": ("--engine", "ddp"),
    "fsdp2": ("--engine", "fsdp2"),
    "mfsdp": ("--engine", "mfsdp"),
    "ours": ("--engine", "ours", "--exact-init"),
    "fsdp2-pairs": ("--engine", "fsdp2", "--unit-layers", "2"),
    "ours-pairs": ("--engine", "ours", "--exact-init", "--unit-layers", "2"),
    "ours-copy-engine-pairs": ("--engine", "ours", "--exact-init", "--copy-engine", "--unit-layers", "2"),
    "ours-resident": ("--engine", "ours", "--exact-init", "--residency", "auto"),
    "ours-hsdp": ("--engine", "ours", "--exact-init", "--outer", "no_shard"),
    "ours-hfsdp": ("--engine", "ours", "--exact-init", "--outer", "optim"),
    "ours-copy-engine": ("--engine", "ours", "--exact-init", "--copy-engine"),
    "ours-copy-engine-resident": ("--engine", "ours", "--exact-init", "--copy-engine", "--residency", "auto"),
    "ours-double-buffer": ("--engine", "ours", "--exact-init", "--double-buffer", "--persist"),
    "ours-user-buffers": ("--engine", "ours", "--exact-init", "--nccl-ub", "--persist"),
    "fsdp2-expandable": ("--engine", "fsdp2"),
    "ours-expandable": ("--engine", "ours", "--exact-init"),
}
#: Environment variables, by how an engine's name ends.
ENVIRONMENTS = {"-expandable": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}


#: Time for torchrun to end its ranks when it is told to end; it takes less.
GRACE_S = 45.0


def run(command: Sequence[str], environment: dict[str, str], timeout_s: float) -> tuple[str, str]:
    """Output and errors of a launcher and its ranks.

    Raises:
        subprocess.TimeoutExpired: they took longer, and have been ended.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as launcher:
        try:
            return launcher.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            launcher.terminate()  # torchrun ends its ranks then; if it is killed they stay on the GPUs
            try:
                launcher.communicate(timeout=GRACE_S)
            except subprocess.TimeoutExpired:
                launcher.kill()
            raise


def measure(row: str, engine: str, given: argparse.Namespace) -> dict[str, Any]:
    """One engine's result in one row; its error, if it has none."""
    arguments = [*ENGINES[engine], *ROWS[row], "--steps", str(given.steps)]
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(given.gpus)]
    if given.pretend_ranks:
        command, arguments = [], [*arguments, "--pretend-ranks", str(given.pretend_ranks)]
    # The peer has our import name and refuses to be where megatron-core is: it gets its own folder and nothing else.
    paths = [given.peer_path] if engine == "mfsdp" else [str(ENGINE_SOURCE), os.environ.get("PYTHONPATH")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    added = next((added for end, added in ENVIRONMENTS.items() if engine.endswith(end)), {})
    environment |= added
    start, limit_s = time.monotonic(), given.timeout_s
    try:
        output, errors = run([sys.executable, *command, str(HERE / "fsdp_bench.py"), *arguments], environment, limit_s)
        lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
        result = json.loads(lines[-1].removeprefix("RESULT ")) if lines else {"error": errors[-4000:]}
    except subprocess.TimeoutExpired:
        result = {"error": f"no result within {limit_s} s"}
    launcher = ("torchrun", *command[2:]) if command else ("python",)
    settings = (f"{name}={value}" for name, value in added.items())
    shown = " ".join((*settings, *launcher, "benchmarks/fsdp_bench.py", *arguments))
    return {"command": shown, "wall_s": round(time.monotonic() - start, 1), **result}


def machine() -> dict[str, Any]:
    """Machine and versions of a measurement."""
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
        "commit": os.environ.get("COMMIT") or commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
    }


def reason(error: str) -> str:
    """The line of an error's text that says most; torchrun puts its own below that of Python."""
    lines = [line.strip() for line in error.splitlines() if re.search(r"\w", line)]
    telling = [line for line in lines if re.match(r"(\[rank\d+\]: *)?[\w.]*(Error|Exception)\b", line)]
    of_ranks = [line for line in telling if line.startswith("[rank") or "torch.distributed.elastic" not in line]
    return (of_ranks or telling or lines or ["nothing was said"])[-1][:80].replace("|", "/")


def table(folder: Path) -> str:
    """The latest measurement of each engine in each row as Markdown, with the call it was made in."""
    shown = "step: median (range) ms | tokens/s/GPU | allocated / reserved GiB | first, middle, last loss"
    real = _rows(folder, pretended=False, columns=shown, cells=_speed_cells)
    pretended = _rows(folder, pretended=True, columns="allocated / reserved GiB | step / host ms", cells=_memory_cells)
    return "\n".join(
        real + (["", "Of one GPU that pretends to be one of several:", "", *pretended] if pretended else [])
    )


def _speed_cells(result: dict[str, Any]) -> str:
    return (
        f"{result['step_ms']} ({result['min_ms']} to {result['max_ms']}) | {result['tok_s_gpu']:,} | "
        f"{result['alloc_gib']} / {result['reserved_gib']} | {', '.join(f'{loss:.4f}' for loss in result['loss'])}"
    )


def _memory_cells(result: dict[str, Any]) -> str:
    return f"{result['alloc_gib']} / {result['reserved_gib']} | {result['step_ms']} / {result['host_ms']}"


def _rows(folder: Path, *, pretended: bool, columns: str, cells: Callable[[dict[str, Any]], str]) -> list[str]:
    """Lines of one table; none if there is nothing to show."""
    latest: dict[tuple[str, int], dict[str, Any]] = {}
    for file in sorted(folder.glob("*.json")):
        measured = json.loads(file.read_text(encoding="utf-8"))
        if measured.get("pretended", False) is pretended:
            call = f"{file.name[4:6]}-{file.name[6:8]} {file.name[9:11]}:{file.name[11:13]}"
            results = {engine: {"call": call, **result} for engine, result in measured["results"].items()}
            latest.setdefault((measured["row"], measured["gpus"]), {}).update(results)
    lines = [f"| workload | GPUs | engine | {columns} | call |", f"|---|---|---|---|{'---|' * columns.count('|')}---|"]
    empty = " |" * columns.count("|")
    for (row, gpus), results in sorted(latest.items()):
        for engine, result in results.items():
            is_wrong = "error" in result
            found = f"failed: {reason(result['error'])}{empty}" if is_wrong else cells(result)
            lines.append(f"| {row} | {gpus} | {engine} | {found} | {result['call']} |")
    return lines if latest else []


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints, or only prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--pretend-ranks", type=int, default=0, help="on one GPU, be the first of so many ranks")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--engines", nargs="+", default=["nocomm", "fsdp2", "ours", "ours-resident"], choices=ENGINES)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--timeout-s", type=float, default=300.0)
    parser.add_argument("--peer-path", default="", help="folder that holds the package megatron-fsdp, for mfsdp")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--show", type=Path, help="print the table of this folder and measure nothing")
    given = parser.parse_args(arguments)
    if given.show and not any(given.show.glob("*.json")):
        parser.error(f"--show {given.show}: no results (*.json) are there")
    if given.show:
        sys.stdout.write(table(given.show) + "\n")
        return
    peer = Path(given.peer_path).resolve()
    is_peer = bool(given.peer_path) and (peer / "megatron_fsdp").is_dir() and peer != ENGINE_SOURCE
    if "mfsdp" in given.engines and not is_peer:  # an installed engine of ours would be measured under its name
        parser.error(f"mfsdp needs --peer-path FOLDER, which holds its package megatron_fsdp; came {given.peer_path!r}")
    needed, there = 1 if given.pretend_ranks else given.gpus, torch.cuda.device_count()
    if there < needed:  # nothing but failures would be written
        parser.error(f"{needed} GPUs are needed and {there} are there: --gpus N, or --pretend-ranks N on one")
    given.out.mkdir(parents=True, exist_ok=True)
    for row in given.rows:
        results: dict[str, Any] = {}
        for engine in given.engines:
            results[engine] = measure(row, engine, given)
            sys.stdout.write(f"{row} {engine}: {json.dumps(results[engine])}\n")
            sys.stdout.flush()
        is_pretended, gpus = bool(given.pretend_ranks), given.pretend_ranks or given.gpus
        measured = {"row": row, "gpus": gpus, "pretended": is_pretended, "machine": machine(), "results": results}
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{row}-{gpus}{'pretended' if is_pretended else 'gpus'}.json"
        (given.out / name).write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(table(given.out) + "\n")


if __name__ == "__main__":
    main()
