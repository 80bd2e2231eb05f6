"""`benchmarks/pretend.py` runs a training script as the first of many ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
FLAGS = (
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --transformer-impl local --num-layers 2 "
    "--hidden-size 128 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 "
    "--global-batch-size 16 --untie-embeddings-and-output-weights --vocab-size 8191 --tokenizer-type NullTokenizer "
    "--mock-data --bf16 --lr 1e-5 --lr-decay-style constant --train-iters 2 --log-interval 1 --eval-iters 0 "
    "--no-check-for-nan-in-loss-and-grad"
).split()


def pretend(*arguments: str) -> subprocess.CompletedProcess:
    told = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "benchmarks/pretend.py", *arguments],
        cwd=ROOT,
        env=os.environ | told,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_one_process_holds_what_the_first_of_eight_ranks_holds():
    ran = pretend("8", "pretrain_gpt.py", *FLAGS)
    told = ran.stdout + ran.stderr
    assert ran.returncode == 0, told
    assert "consumed samples:           32 " in told, "two iterations of two samples for each of eight ranks"
    numel = int(re.search(r"optim_grads_params, ([\d,]+) parameters", told)[1].replace(",", ""))
    mib = float(re.search(r"per rank ([\d.]+) MiB persistent", told)[1])
    # Main weights in fp32, moments not counted: a shard of these, its padding, and what is not sharded.
    assert 0.9 <= mib / (numel * 4 / 8 / 2**20) <= 1.6, told


def test_what_cannot_be_run_is_said():
    assert "usage" in pretend("pretrain_gpt.py").stderr
    assert "there is no file nothing.py" in pretend("2", "nothing.py").stderr
