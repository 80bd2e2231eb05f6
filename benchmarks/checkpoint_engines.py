"""The two engines of `checkpoint_bench.py`: the benchmark's Llama, sharded, with Adam, and how each is saved."""

import argparse
import contextlib
import dataclasses
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parent))
import fsdp_bench  # noqa: E402

from megatron.training.build import build_run  # noqa: E402
from megatron.training.checkpoint.load.loader import load_checkpoint  # noqa: E402
from megatron.training.checkpoint.save.saver import Saver  # noqa: E402
from megatron.training.config import load_config  # noqa: E402
from megatron.training.initialize import initialized  # noqa: E402
from megatron.training.job import prepare  # noqa: E402
from megatron.training.launch import ignore_expected_warnings  # noqa: E402
from megatron.training.ranks import Ranks  # noqa: E402
from megatron.training.state import Task  # noqa: E402


class Engine(Protocol):
    """A sharded model with its optimizer that can be saved."""

    optimizer: torch.optim.Optimizer
    """Its parameters and state are this rank's shards."""
    can_skip_verification: bool
    """True if `load` without `verify` does less."""

    def save(self, root: Path) -> None:
        """Writes a checkpoint below `root` and waits for it."""

    def prepare(self, root: Path) -> None:
        """Starts what writes in the background, as a run does before it trains."""

    def begin(self, root: Path) -> None:
        """Begins to write one in the background; when it returns everything may change."""

    def finish(self) -> None:
        """Waits for what was begun."""

    def load(self, root: Path, *, verify: bool) -> None:
        """Reads the latest one."""

    def close(self) -> None:
        """Ends its processes."""


class Ours:
    """A run of the training loop whose model is the benchmark's."""

    can_skip_verification = True

    def __init__(self, options: argparse.Namespace, device: torch.device, stack: contextlib.ExitStack) -> None:
        ignore_expected_warnings()
        hidden, ffn, layers, heads, kv_heads, vocab = fsdp_bench.SIZES[options.size]
        flags = (
            f"--use-megatron-fsdp --num-layers {layers} --hidden-size {hidden} --ffn-hidden-size {ffn} "
            f"--num-attention-heads {heads} --group-query-attention --num-query-groups {kv_heads} --seq-length 64 "
            "--position-embedding-type rope --micro-batch-size 1 --lr 1e-4 --train-iters 100 --mock-data --bf16 "
            f"--tokenizer-type NullTokenizer --vocab-size {vocab - 1} --fsdp-unit-modules fsdp_bench.Block "
        )
        ranks = Ranks(
            rank=dist.get_rank(),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            world_size=dist.get_world_size(),
        )
        job = prepare(load_config(shlex.split(flags)), ranks.world_size)
        world = stack.enter_context(initialized(job.config, job.plan, ranks))
        task = Task(
            model_provider=lambda job, core_config: _model(options, device, torch.bfloat16),
            forward_step=_no_step,
            datasets_provider=_no_step,
        )
        self._run = build_run(job, task, world)
        self._run.optimizer.fqn_state_dict()  # Makes the moments.
        self.optimizer = self._run.optimizer.optimizer
        self._background = None

    def _run_with(self, **checkpoint: Any) -> Any:
        """The run as if it had been started with other flags for its checkpoints."""
        config = self._run.config
        config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, **checkpoint))
        return dataclasses.replace(self._run, job=dataclasses.replace(self._run.job, config=config))

    def save(self, root: Path) -> None:
        self._run.state.iteration += 1
        Saver(self._run_with(save=root)).save()

    def begin(self, root: Path) -> None:
        self._run.state.iteration += 1
        self._background.save()

    def prepare(self, root: Path) -> None:
        self._background = Saver(self._run_with(save=root, async_save=True))

    def finish(self) -> None:
        self._background.finish()

    def load(self, root: Path, *, verify: bool) -> None:
        load_checkpoint(self._run_with(load=root, verify_checksums=verify))

    def close(self) -> None:
        if self._background is not None:
            self._background.close()


class Fsdp2:
    """torch's own, with what its distributed checkpoint offers."""

    can_skip_verification = False

    def __init__(self, options: argparse.Namespace, device: torch.device, stack: contextlib.ExitStack) -> None:
        mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        self._model = _model(options, device, torch.float32)
        for layer in self._model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self._model, mesh=mesh, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)
        get_optimizer_state_dict(self._model, self.optimizer)  # Makes the moments.
        self._options, self._device = options, device
        self._stager: Any = None
        self._writing: Any = None
        self._group: dist.ProcessGroup | None = None

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, root: Path) -> None:
        writer = dcp.FileSystemWriter(root / "checkpoint", thread_count=self._options.threads)
        dcp.save(self._state(), storage_writer=writer)

    def prepare(self, root: Path) -> None:
        """Makes what copies tensors to the host, in pinned memory that processes share if there are GPUs."""
        on_gpu = self._device.type == "cuda"
        # A thread communicates while the bench does: all the time, or to start a process.
        self._group = dist.new_group(backend="gloo")
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_gpu,
                use_shared_memory=self._options.async_by == "process",
                use_async_staging=False,
                use_non_blocking_copy=on_gpu,
            )
        )

    def begin(self, root: Path) -> None:
        self._writing = dcp.async_save(
            self._state(),
            storage_writer=dcp.FileSystemWriter(root / "checkpoint", thread_count=self._options.threads),
            async_checkpointer_type=AsyncCheckpointerType(self._options.async_by),
            async_stager=self._stager,
            process_group=self._group,
        )
        if hasattr(self._writing, "staging_completion"):
            self._writing.staging_completion.result()
            self._writing = self._writing.upload_completion

    def finish(self) -> None:
        self._writing.result()

    def load(self, root: Path, *, verify: bool) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=root / "checkpoint")
        set_state_dict(
            self._model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()


Make = Callable[[argparse.Namespace, torch.device, contextlib.ExitStack], Engine]
"""Builds an engine; what it opens is closed with the stack. **Collective.**"""
ENGINES: dict[str, Make] = {"ours": Ours, "fsdp2": Fsdp2}


def _model(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    model = fsdp_bench.build(argparse.Namespace(size=options.size, recompute=False, unit_layers=1), device, dtype)
    fsdp_bench.init_weights(model)
    return model


def _no_step(*_: Any) -> Any:
    raise RuntimeError("this benchmark does not train")
