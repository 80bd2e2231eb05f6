"""Train a small GPT on the Python standard library's source, sharded over two processes, from raw text to a loss curve.

    python examples/quickstart.py [--out DIR] [--processes N] [--iters N] [--resume-iters N]

Prepares the corpus, trains with ZeRO-3 (on GPUs if there are two, else on the CPU), evaluates, saves a checkpoint,
resumes from it for a few more iterations and draws DIR/loss.png. It prints every command that it runs, so that each can
be run by hand.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch
from matplotlib.figure import Figure

REPOSITORY = Path(__file__).resolve().parents[1]
#: Parts of the library's folder that are not the library.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "ensurepip"}
LOG_LINE = re.compile(r"iteration\s+(\d+)/\s*\d+ \|.*? lm loss: ([0-9.E+-]+) \|")
VALID_LINE = re.compile(r"validation loss at iteration (\d+)(?: on validation set)? \| lm loss value: ([0-9.E+-]+)")
#: The loss must end under this fraction of the entropy that a model without context cannot beat.
FAR_BELOW = 0.75


@dataclasses.dataclass
class Curve:
    """Losses in nats per byte, by iteration."""

    train: dict[int, float] = dataclasses.field(default_factory=dict)
    valid: dict[int, float] = dataclasses.field(default_factory=dict)

    def read(self, line: str) -> None:
        """Adds the losses of a log line."""
        for pattern, values in ((LOG_LINE, self.train), (VALID_LINE, self.valid)):
            for iteration, loss in pattern.findall(line):
                values[int(iteration)] = float(loss)


def corpus_files(limit_bytes: int) -> list[Path]:
    """Source files of the standard library, in a fixed order, until they hold `limit_bytes`."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files, total = [], 0
    for path in sorted(root.rglob("*.py")):
        if SKIPPED & set(path.relative_to(root).parts):
            continue
        try:
            path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        files.append(path)
        total += path.stat().st_size
        if total >= limit_bytes:
            break
    return files


def unigram_entropy(files: list[Path]) -> float:
    """Nats per byte of the corpus for a model that knows how often each byte occurs, and nothing else."""
    counts: collections.Counter[int] = collections.Counter()
    for path in files:
        counts.update(path.read_bytes())
    total = sum(counts.values())
    return -sum(count / total * math.log(count / total) for count in counts.values())


def run(command: list[str], curve: Curve | None = None) -> None:
    """Prints and runs a command, showing its output and reading the losses from it; exits if it fails."""
    print(f"\n$ {shlex.join(command)}\n", flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            if curve is not None:
                curve.read(line)
    if process.returncode:
        raise SystemExit(f"the command above failed with exit code {process.returncode}")


def prepare(files: list[Path], out: Path) -> Path:
    """Tokenizes copies of `files` into a data set; returns what `--data-path` takes."""
    corpus, prefix = out / "corpus", out / "stdlib"
    corpus.mkdir(exist_ok=True)
    for number, path in enumerate(files):
        shutil.copyfile(path, corpus / f"{number:05d}_{path.name}")
    places = ["--input", str(corpus), "--input-format", "text", "--output-prefix", str(prefix)]
    tokens = ["--tokenizer-type", "ByteLevelTokenizer", "--append-eod", "--workers", "2"]
    run([sys.executable, "tools/preprocess_data.py", *places, *tokens])
    return Path(f"{prefix}_text_document")


def train_command(options: argparse.Namespace, data: Path) -> list[str]:
    """The torchrun command: stops with a checkpoint after `--iters` iterations; given again, it goes on from there."""
    flags = f"""
        --num-layers 4 --hidden-size 128 --ffn-hidden-size 352 --num-attention-heads 4 --seq-length 256
        --max-position-embeddings 256 --position-embedding-type rope --swiglu --normalization RMSNorm
        --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
        --transformer-impl local --tokenizer-type ByteLevelTokenizer --micro-batch-size 4 --global-batch-size 16
        --train-iters {options.iters + options.resume_iters} --exit-interval {options.iters}
        --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 10
        --weight-decay 0.1 --clip-grad 1.0 --adam-beta2 0.95
        --split 95,5,0 --num-workers 1 --log-interval 10
        --eval-interval {options.iters} --eval-iters 4 --save-interval {options.iters}
        --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor
    """.split()
    checkpoints = str(options.out / "checkpoints")
    places = ["--data-path", str(data), "--save", checkpoints, "--load", checkpoints]
    places += ["--tensorboard-dir", str(options.out / "tensorboard")]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(options.processes)]
    return [*launcher, "pretrain_gpt.py", *flags, *places]


def draw(curve: Curve, entropy: float, resumed_at: int, path: Path) -> None:
    """Writes the loss curve as a PNG."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*sorted(curve.train.items()), strict=True), label="training", linewidth=1.5)
    if curve.valid:
        axes.plot(*zip(*sorted(curve.valid.items()), strict=True), "o", label="validation")
    axes.axhline(entropy, color="gray", linestyle="--", label=f"unigram entropy {entropy:.2f}")
    axes.axvline(resumed_at, color="gray", linestyle=":", label="saved and resumed")
    axes.set(
        xlabel="iteration",
        ylabel="loss (nats per byte)",
        title="GPT on the Python standard library, ZeRO-3",
        ylim=(0, None),
    )
    axes.legend()
    figure.savefig(path, dpi=120)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out = REPOSITORY / "quickstart_out"
    parser.add_argument("--out", type=Path, default=out, help="folder for everything that is written")
    parser.add_argument("--processes", type=int, default=2, help="data-parallel processes")
    parser.add_argument("--iters", type=int, default=300, help="iterations before the checkpoint")
    parser.add_argument("--resume-iters", type=int, default=30, help="iterations after it")
    parser.add_argument("--corpus-mb", type=float, default=8.0, help="how much source to use")
    options = parser.parse_args(argv)
    if torch.cuda.is_available() and torch.cuda.device_count() < options.processes:
        parser.error(f"--processes {options.processes} needs as many GPUs, and there are {torch.cuda.device_count()}")
    options.out = options.out.resolve()
    return options


def main(argv: list[str] | None = None) -> None:
    """The whole way."""
    options = parse(argv)
    if (options.out / "checkpoints").exists():
        raise SystemExit(f"{options.out / 'checkpoints'} exists: remove it, or choose another folder with --out")
    options.out.mkdir(parents=True, exist_ok=True)
    files = corpus_files(int(options.corpus_mb * 1e6))
    entropy = unigram_entropy(files)
    megabytes = sum(path.stat().st_size for path in files) / 1e6
    print(f"corpus: {len(files)} files, {megabytes:.1f} MB, {entropy:.3f} nats per byte")
    data = prepare(files, options.out)
    curve = Curve()
    run(train_command(options, data), curve)
    print(f"\nstopped after iteration {max(curve.train)}; the same command resumes from the checkpoint:")
    run(train_command(options, data), curve)
    draw(curve, entropy, options.iters, options.out / "loss.png")
    end = max(curve.train)
    last = curve.train[end]
    print(f"\nloss {last:.3f} nats per byte after {end} iterations; unigram entropy {entropy:.3f}")
    print(f"curve in {options.out / 'loss.png'}")
    if not last < FAR_BELOW * entropy:
        raise SystemExit(f"the loss should be below {FAR_BELOW} x {entropy:.3f}")


if __name__ == "__main__":
    main()
