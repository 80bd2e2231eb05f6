"""Time one data-parallel engine on one Llama-shaped model; every engine runs this same file.

    torchrun --nproc-per-node N benchmarks/fsdp_bench.py --engine {ours,fsdp2,mfsdp,ddp,nocomm} --size 8b --seq 4096 \\
        --grad-comm bf16

Prints one JSON line on rank 0: step time (median, ms), time in which the host issued it, tokens/s/GPU, MFU, peak memory
(GiB), losses. --pretend-ranks 8, without torchrun, is the first of 8 ranks whose collectives return at once and move
nothing: memory and host time as on 8 GPUs, and a step without communication; its losses mean nothing.
Weights, data and optimizer are seeded alike, so the losses of two engines are comparable.
"""

import argparse
import contextlib
import dataclasses
import importlib
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed import fsdp as fsdp2

SIZES = {  # hidden, ffn, layers, heads, kv heads, vocab
    "tiny": (128, 384, 3, 4, 2, 1024),
    "1b": (2048, 8192, 16, 32, 8, 128256),
    "3b": (3072, 8192, 28, 24, 8, 128256),
    "8b": (4096, 14336, 32, 32, 8, 128256),
    "14b": (5120, 17408, 40, 40, 8, 128256),
}
PEAK_BF16 = 989e12


class RMSNorm(nn.Module):
    def __init__(self, h):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(h))

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-5)

    def reset_parameters(self):
        nn.init.ones_(self.weight)


def rope_table(seq, dim, device):
    inv = 1.0 / (500000.0 ** (torch.arange(0, dim, 2, device=device).float() / dim))
    ang = torch.outer(torch.arange(seq, device=device).float(), inv)
    return ang.cos(), ang.sin()


def rope(x, cos, sin):  # [b, s, n, d]
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[None, :, None].to(x.dtype), sin[None, :, None].to(x.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Block(nn.Module):
    def __init__(self, h, f, n, kv):
        super().__init__()
        self.n, self.kv, self.d = n, kv, h // n
        self.attn_norm, self.mlp_norm = RMSNorm(h), RMSNorm(h)
        self.wq = nn.Linear(h, h, bias=False)
        self.wk = nn.Linear(h, kv * self.d, bias=False)
        self.wv = nn.Linear(h, kv * self.d, bias=False)
        self.wo = nn.Linear(h, h, bias=False)
        self.w1 = nn.Linear(h, f, bias=False)
        self.w3 = nn.Linear(h, f, bias=False)
        self.w2 = nn.Linear(f, h, bias=False)

    def forward(self, x, cos, sin):
        b, s, h = x.shape
        y = self.attn_norm(x)
        q = rope(self.wq(y).view(b, s, self.n, self.d), cos, sin).transpose(1, 2)
        k = rope(self.wk(y).view(b, s, self.kv, self.d), cos, sin).transpose(1, 2)
        v = self.wv(y).view(b, s, self.kv, self.d).transpose(1, 2)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.wo(o.transpose(1, 2).reshape(b, s, h))
        y = self.mlp_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Stack(nn.Sequential):
    """Several layers that are one unit."""

    def forward(self, x, cos, sin):
        for layer in self:
            x = layer(x, cos, sin)
        return x


class Llama(nn.Module):
    def __init__(self, h, f, layers, n, kv, vocab, unit_layers=1):
        super().__init__()
        self.hd = h // n
        self.embed = nn.Embedding(vocab, h)
        blocks = [Block(h, f, n, kv) for _ in range(layers)]
        if unit_layers > 1:
            blocks = [Stack(*blocks[i : i + unit_layers]) for i in range(0, layers, unit_layers)]
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(h)
        self.head = nn.Linear(h, vocab, bias=False)
        self.recompute = False

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        cos, sin = rope_table(tokens.shape[1], self.hd, tokens.device)
        for layer in self.layers:
            if self.recompute:
                x = torch.utils.checkpoint.checkpoint(layer, x, cos, sin, use_reentrant=False)
            else:
                x = layer(x, cos, sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


@torch.no_grad()
def init_weights(model, seed=1234):
    """Same values whatever the engine: each full parameter is drawn from its own seeded generator."""
    for i, (name, p) in enumerate(model.named_parameters()):
        if "norm" in name:
            p.fill_(1.0)
            continue
        g = torch.Generator(device=p.device).manual_seed(seed + i)
        p.normal_(0.0, 0.02, generator=g)


def build(args, device, dtype):
    with torch.device(device):
        torch.set_default_dtype(dtype)
        model = Llama(*SIZES[args.size], unit_layers=args.unit_layers)
        torch.set_default_dtype(torch.float32)
    model.recompute = args.recompute
    return model


class Engine(NamedTuple):
    """A sharded model with its optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    microbatch: Callable[[bool], contextlib.AbstractContextManager]
    """Wraps forward and backward; its argument is true for the last micro-batch of a step."""


def make_engine(args, device) -> Engine:
    """The engine that the command line asks for, with the benchmark's model on it. **Collective.**"""
    if args.engine not in ENGINES:
        raise SystemExit(f"unknown engine {args.engine}")
    return ENGINES[args.engine](args, device)


def make_ddp(args, device) -> Engine:
    """torch's replicated data parallelism."""
    model = build(args, device, torch.bfloat16)
    init_weights(model)
    model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Engine(model, adamw(model.parameters()), any_microbatch)


def make_nocomm(args, device) -> Engine:
    """The limit: the same compute, Adam on this rank's 1/N in fp32, no collective at all."""
    model = build(args, device, torch.bfloat16)
    init_weights(model)
    numel = sum(p.numel() for p in model.parameters()) // dist.get_world_size()
    shard = [nn.Parameter(torch.randn(numel // 64, device=device)) for _ in range(64)]
    for part in shard:
        part.grad = torch.randn_like(part)
    optimizer = adamw(shard)
    optimizer.zero_grad = lambda: model.zero_grad(set_to_none=True)
    return Engine(model, optimizer, any_microbatch)


def make_fsdp2(args, device) -> Engine:
    """torch's own fully sharded data parallelism."""
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=COMM_DTYPES[args.grad_comm])
    model = build(args, device, torch.float32)
    init_weights(model)
    for layer in model.layers:
        fsdp2.fully_shard(layer, mp_policy=policy, reshard_after_forward=True)
    if args.units == "all":
        fsdp2.fully_shard(model.embed, mp_policy=policy, reshard_after_forward=True)
        fsdp2.fully_shard([model.norm, model.head], mp_policy=policy, reshard_after_forward=False)
    fsdp2.fully_shard(model, mp_policy=policy, reshard_after_forward=True)
    torch.cuda.empty_cache()

    @contextlib.contextmanager
    def microbatch(is_last):
        model.set_requires_gradient_sync(True)
        model.set_is_last_backward(is_last)
        yield

    return Engine(model, adamw(model.parameters()), microbatch)


def make_mfsdp(args, device) -> Engine:
    """The released megatron-fsdp, which has our import name: table.py puts it alone on the path."""
    mesh = dist.device_mesh.init_device_mesh("cuda", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
    model, megatron_fsdp = shard(
        args,
        device,
        device_mesh=mesh,
        dp_shard_dim="dp",
        tp_dim="tp",
        sync_model_each_microbatch=True,
    )
    optimizer = megatron_fsdp.fully_shard_optimizer(adamw(model.parameters()))
    torch.cuda.empty_cache()
    return Engine(model, optimizer, any_microbatch)


def make_ours(args, device) -> Engine:
    """This repository's engine."""
    model, megatron_fsdp = shard(
        args,
        device,
        **hybrid(args.outer),
        overlap_grad_reduce=not args.plain,
        overlap_param_gather=not args.plain,
        residency_bytes=args.residency if args.residency == "auto" else int(float(args.residency)),
        copy_engine_gather=args.copy_engine,
        fsdp_db_use_persist_buf_on_alloc_fail=args.persist,
        sync_model_each_microbatch=args.accum == 1,
    )

    @contextlib.contextmanager
    def microbatch(is_last):
        model.is_last_microbatch = is_last
        yield

    if args.exact_init:  # main weights from the unrounded values that FSDP2 starts from, not from the bf16 model
        full = build(args, device, torch.float32)
        init_weights(full)
        model.module.load_state_dict(full.state_dict())
        del full
    optimizer = megatron_fsdp.fully_shard_optimizer(adamw(model.parameters()))
    torch.cuda.empty_cache()
    return Engine(model, optimizer, microbatch)


ENGINES: dict[str, Callable[[argparse.Namespace, torch.device], Engine]] = {
    "ddp": make_ddp,
    "nocomm": make_nocomm,
    "fsdp2": make_fsdp2,
    "mfsdp": make_mfsdp,
    "ours": make_ours,
}
COMM_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def shard(args, device, **options) -> tuple[nn.Module, Any]:
    """The model, sharded by the `megatron_fsdp` that the path has, and that package. **Collective.**"""
    megatron_fsdp = importlib.import_module("megatron_fsdp")
    model = build(args, device, torch.bfloat16)
    init_weights(model)
    layer = Stack if args.unit_layers > 1 else Block
    policy = megatron_fsdp.MixedPrecisionPolicy(
        main_params_dtype=torch.float32,
        main_grads_dtype=torch.float32,
        grad_comm_dtype=COMM_DTYPES[args.grad_comm],
    )
    model = megatron_fsdp.fully_shard_model(
        model,
        fsdp_unit_modules=[layer, nn.Embedding] if args.units == "all" else [layer],
        zero_dp_strategy=args.strategy,
        mixed_precision_policy=policy,
        nccl_ub=args.nccl_ub,
        fsdp_double_buffer=args.double_buffer,
        **options,
    )
    return model, megatron_fsdp


def hybrid(outer: str) -> dict[str, Any]:
    """Options of a mesh of 2 x N/2, whose outer half repeats (`no_shard`) or shares the optimizer's state (`optim`)."""
    if not outer:
        return {}
    names = ("outer", "dp")
    mesh = dist.device_mesh.init_device_mesh("cuda", (2, dist.get_world_size() // 2), mesh_dim_names=names)
    return {
        "device_mesh": mesh,
        "dp_shard_dim": "dp",
        "dp_outer_dim": "outer",
        "outer_dp_sharding_strategy": outer,
        "hybrid_fsdp_group": mesh[names]._flatten("all").get_group(),
    }


def adamw(params) -> torch.optim.Optimizer:
    """The optimizer of every engine."""
    return torch.optim.AdamW(params, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def any_microbatch(is_last: bool) -> contextlib.AbstractContextManager:
    """Wraps a micro-batch of an engine that treats all alike."""
    return contextlib.nullcontext()


def parser():
    """The command line."""
    ap = argparse.ArgumentParser()
    ap.add_argument("--engine", required=True)
    ap.add_argument("--size", default="8b", choices=SIZES)
    ap.add_argument("--seq", type=int, default=4096)
    ap.add_argument("--mbs", type=int, default=1)
    ap.add_argument("--accum", type=int, default=1)
    ap.add_argument("--strategy", default="optim_grads_params")
    ap.add_argument("--grad-comm", default="fp32", choices=["fp32", "bf16"])
    ap.add_argument("--units", default="layers", choices=["layers", "all"])
    ap.add_argument("--unit-layers", type=int, default=1, help="layers that are sharded as one unit")
    ap.add_argument("--recompute", action="store_true")
    ap.add_argument("--nccl-ub", action="store_true")
    ap.add_argument("--double-buffer", action="store_true")
    ap.add_argument("--persist", action="store_true", help="ours: what fits no double buffer keeps a buffer of its own")
    outer = ["", "no_shard", "optim"]
    ap.add_argument("--outer", default="", choices=outer, help="ours: on a mesh of 2 x N/2, the outer axis so")
    ap.add_argument("--plain", action="store_true", help="ours: nothing runs beside anything else")
    ap.add_argument("--copy-engine", action="store_true", help="ours: gather by copies out of the other GPUs' memory")
    stays = "ours: bytes of weights that stay gathered through a step, or auto"
    ap.add_argument("--residency", default="0", help=stays)
    ap.add_argument("--steps", type=int, default=12)
    ap.add_argument("--warmup", type=int, default=4)
    ap.add_argument("--trace", default="")
    pretend = "be the first of so many ranks, whose collectives do nothing"
    ap.add_argument("--pretend-ranks", type=int, default=0, help=pretend)
    exact = "ours: start from the same fp32 weights as fsdp2, to compare losses"
    ap.add_argument("--exact-init", action="store_true", help=exact)
    return ap


def parse() -> argparse.Namespace:
    """The command line's options, checked."""
    args = parser().parse_args()
    if args.steps <= args.warmup or min(args.mbs, args.seq, args.accum, args.unit_layers) < 1:
        raise SystemExit(
            f"error: --steps {args.steps} should be above --warmup {args.warmup}; "
            "--mbs, --seq, --accum, --unit-layers at least 1"
        )
    return args


def join(args) -> tuple[int, torch.device]:
    """This rank and its GPU, once all ranks have joined. **Collective.**"""
    rank, local = (0, 0) if args.pretend_ranks else (int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    if args.pretend_ranks:
        from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415  registers the backend

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.pretend_ranks)
    else:
        dist.init_process_group("nccl", device_id=device)
    return rank, device


@dataclasses.dataclass
class Measured:
    """Figures of the steps; times are those after the warm-up."""

    step_ms: list[float] = dataclasses.field(default_factory=list)
    host_ms: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    """Mean over ranks, of every step."""


def train(args, engine: Engine, rank: int, device: torch.device) -> Measured:
    """Runs and times all steps. **Collective.**"""
    measured = Measured()
    generator = torch.Generator(device=device).manual_seed(777 + rank)
    profiler = torch.profiler.profile() if args.trace else None
    for step in range(args.steps):
        if profiler is not None and step == args.steps - 2:
            profiler.start()
        torch.cuda.synchronize()
        dist.barrier()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        issue_s = time.perf_counter()
        loss = train_step(args, engine, generator)
        end.record()
        issue_s = time.perf_counter() - issue_s
        torch.cuda.synchronize()
        if step >= args.warmup:
            measured.step_ms.append(begin.elapsed_time(end))
            measured.host_ms.append(issue_s * 1e3)
        dist.all_reduce(loss)
        measured.losses.append(round(loss.item() / dist.get_world_size(), 5))
    if profiler is not None:
        profiler.stop()
        if rank == 0:
            profiler.export_chrome_trace(args.trace)
    return measured


def train_step(args, engine: Engine, generator: torch.Generator) -> torch.Tensor:
    """One step on random tokens; gives this rank's loss. **Collective.**"""
    vocab, device = SIZES[args.size][5], generator.device
    total = 0.0
    for number in range(args.accum):
        tokens = torch.randint(0, vocab, (args.mbs, args.seq + 1), device=device, generator=generator)
        with engine.microbatch(number == args.accum - 1):
            loss = engine.model(tokens[:, :-1], tokens[:, 1:]) / args.accum
            loss.backward()
        total = total + loss.detach()
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    return total


def summary(args, measured: Measured, init_s: float, device: torch.device) -> dict[str, Any]:
    """The result that is printed, over all ranks: the slowest median step, the largest peaks. **Collective.**"""
    median = torch.tensor(statistics.median(measured.step_ms), device=device)
    dist.all_reduce(median, op=dist.ReduceOp.MAX)
    peaks = [torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30]
    peaks = torch.tensor(peaks, device=device)
    dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    hidden, _, layers, *_ = SIZES[args.size]
    numel = sum(math.prod(p.shape) for p in build(args, "meta", torch.bfloat16).parameters())
    tokens = args.mbs * args.seq * args.accum
    flops = (6 * numel + 6 * layers * hidden * args.seq) * tokens  # dense + causal attention (12*L*h*s/2)
    step_s, losses = median.item() / 1e3, measured.losses
    return {
        **told(args),
        "step_ms": round(median.item(), 1),
        "min_ms": round(min(measured.step_ms), 1),
        "max_ms": round(max(measured.step_ms), 1),
        "host_ms": round(statistics.median(measured.host_ms), 1),
        "tok_s_gpu": round(tokens / step_s),
        "mfu": round(flops / step_s / PEAK_BF16, 4),
        "alloc_gib": round(peaks[0].item(), 2),
        "reserved_gib": round(peaks[1].item(), 2),
        "init_s": round(init_s, 1),
        "params_b": round(numel / 1e9, 3),
        "loss": [losses[0], losses[len(losses) // 2], losses[-1]],
    }


def told(args) -> dict[str, Any]:
    """The command line, as the result repeats it."""
    return {
        "engine": args.engine,
        "size": args.size,
        "gpus": dist.get_world_size(),
        "seq": args.seq,
        "mbs": args.mbs,
        "accum": args.accum,
        "strategy": args.strategy,
        "comm": args.grad_comm,
        "units": args.units,
        "unit_layers": args.unit_layers,
        "ub": args.nccl_ub,
        "db": args.double_buffer,
        "residency": args.residency,
        "copies": args.copy_engine,
        "rc": args.recompute,
        "pretended": bool(args.pretend_ranks),
    }


def main():
    """Command line."""
    args = parse()
    rank, device = join(args)
    torch.manual_seed(0)
    began_s = time.time()
    engine = make_engine(args, device)
    init_s = time.time() - began_s
    torch.cuda.reset_peak_memory_stats()
    measured = train(args, engine, rank, device)
    result = summary(args, measured, init_s, device)
    if rank == 0:
        print("RESULT " + json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
