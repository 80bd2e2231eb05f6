"""Whole training runs, small enough to hold dozens of them. Call inside a rank with megatron-core."""

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest import mock

import torch
import torch.distributed as dist

TINY = (
    "--use-megatron-fsdp --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 "
    "--global-batch-size 8 --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 2 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 127 --eval-iters 0 --num-workers 0 --log-interval 1 "
    "--position-embedding-type rope "
)


@dataclass
class Outcome:
    """Results of a run on this rank."""

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    evaluations: dict[str, float] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizer: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[str, int] = field(default_factory=dict)
    output: str = ""


def train(flags: str, *, task=None, callbacks=()) -> Outcome:
    """A run with the flags of `TINY` and these. **Collective.**"""
    from megatron.training.config import load_config

    return train_config(load_config(shlex.split(TINY + flags)), task=task, callbacks=callbacks)


def train_config(config, *, task=None, callbacks=()) -> Outcome:
    """A run of `config`. **Collective.**"""
    from megatron.training import gpt
    from megatron.training.job import prepare
    from megatron.training.pretrain import pretrain
    from megatron.training.ranks import Ranks

    rank, outcome = dist.get_rank(), Outcome()
    ranks = Ranks(rank=rank, local_rank=rank, world_size=dist.get_world_size())
    job = prepare(config, ranks.world_size)
    output = io.StringIO()
    with contextlib.redirect_stdout(output), kept_groups():
        pretrain(job, task or gpt.TASK, ranks, [recorder(outcome), *callbacks])
    outcome.output = output.getvalue()
    return outcome


def logged(outcome: Outcome) -> list[str]:
    """The lines of iterations without what depends on the clock."""
    lines = [line for line in outcome.output.splitlines() if " iteration " in line]
    return [re.sub(r"\[.*?\]|(elapsed time per iteration \(ms\)|throughput[^:]*): [0-9.]+", "", line) for line in lines]


_GROUPS: dict[tuple, dict[str, object]] = {}


@contextlib.contextmanager
def kept_groups() -> Iterator[None]:
    """Gives each run megatron-core's groups of the first such run in this process: a set costs 17 gloo groups."""
    from megatron.core import parallel_state

    initialize = parallel_state.initialize_model_parallel

    def initialize_once(**sizes) -> None:
        key = tuple(sorted(sizes.items()))
        if key not in _GROUPS:
            initialize(**sizes)
            _GROUPS[key] = {name: value for name, value in vars(parallel_state).items() if name.isupper()}
        vars(parallel_state).update(_GROUPS[key])

    with mock.patch.object(parallel_state, "initialize_model_parallel", initialize_once):
        yield


def recorder(outcome: Outcome):
    """A callback that fills `outcome`."""
    from megatron.training.callbacks import Callback

    class Recorder(Callback):
        def after_step(self, run, result):
            outcome.losses.append(float(result.loss))
            outcome.norms.append(None if result.grad_norm is None else float(result.grad_norm))

        def after_eval(self, run, evaluation):
            outcome.evaluations[f"{evaluation.split} at {run.state.iteration}"] = evaluation.loss

        def end(self, run):
            from megatron.training.checkpoint.format.flatten import flattened

            outcome.state = run.state.state_dict()
            outcome.weights = {name: whole(param) for name, param in run.model.named_parameters()}
            if run.optimizer is not None:
                state = flattened(run.optimizer.fqn_state_dict())
                outcome.optimizer = {k: whole(v) for k, v in state.items() if isinstance(v, torch.Tensor)}

    return Recorder()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor that may be sharded."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()
