"""Time one data-parallel engine on one Llama-shaped model; every engine runs this same file.

torchrun --nproc-per-node N benchmarks/fsdp_bench.py --engine {ours,fsdp2,mfsdp,ddp,nocomm} --size 8b --seq 4096 --grad-comm bf16
Prints one JSON line on rank 0: step time (median, ms), time in which the host issued it, tokens/s/GPU, MFU, peak memory (GiB), losses.
--pretend-ranks 8, without torchrun, is the first of 8 ranks whose collectives return at once and move nothing: memory and
host time as on 8 GPUs, and a step without communication; its losses mean nothing.
Weights, data and optimizer are seeded alike, so the losses of two engines are comparable.
"""

import argparse, contextlib, json, math, os, statistics, time
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F

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


def make_engine(args, device):
    """Returns (model, optimizer, microbatch_context) with microbatch_context(is_last) wrapping fwd+bwd."""
    plain = lambda last: contextlib.nullcontext()
    comm = {"bf16": torch.bfloat16, "fp32": torch.float32}[args.grad_comm]
    adam = lambda ps: torch.optim.AdamW(ps, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    if args.engine == "ddp":
        model = build(args, device, torch.bfloat16)
        init_weights(model)
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        return model, adam(model.parameters()), plain
    if args.engine == "nocomm":  # the limit: the same compute, Adam on this rank's 1/N in fp32, no collective at all
        model = build(args, device, torch.bfloat16)
        init_weights(model)
        n = sum(p.numel() for p in model.parameters()) // dist.get_world_size()
        shard = [nn.Parameter(torch.randn(n // 64, device=device)) for _ in range(64)]
        for s in shard:
            s.grad = torch.randn_like(s)
        opt = adam(shard)
        opt.zero_grad = lambda: model.zero_grad(set_to_none=True)
        return model, opt, plain
    if args.engine == "fsdp2":
        from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy

        mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=comm)
        model = build(args, device, torch.float32)
        init_weights(model)
        kw = dict(mp_policy=mp, reshard_after_forward=True)
        for layer in model.layers:
            fully_shard(layer, **kw)
        if args.units == "all":
            fully_shard(model.embed, **kw)
            fully_shard([model.norm, model.head], mp_policy=mp, reshard_after_forward=False)
        fully_shard(model, **kw)
        torch.cuda.empty_cache()

        @contextlib.contextmanager
        def micro(last):
            model.set_requires_gradient_sync(True)
            model.set_is_last_backward(last)
            yield

        return model, adam(model.parameters()), micro
    if args.engine == "mfsdp":
        from megatron_fsdp import fully_shard_model, fully_shard_optimizer, MixedPrecisionPolicy

        model = build(args, device, torch.bfloat16)
        init_weights(model)
        layer = Stack if args.unit_layers > 1 else Block
        units = [layer, nn.Embedding] if args.units == "all" else [layer]
        mesh = dist.device_mesh.init_device_mesh("cuda", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
        model = fully_shard_model(
            model,
            device_mesh=mesh,
            dp_shard_dim="dp",
            tp_dim="tp",
            fsdp_unit_modules=units,
            zero_dp_strategy=args.strategy,
            mixed_precision_policy=MixedPrecisionPolicy(
                main_params_dtype=torch.float32, main_grads_dtype=torch.float32, grad_comm_dtype=comm
            ),
            nccl_ub=args.nccl_ub,
            fsdp_double_buffer=args.double_buffer,
            sync_model_each_microbatch=True,
        )
        opt = fully_shard_optimizer(adam(model.parameters()))
        torch.cuda.empty_cache()
        return model, opt, plain
    if args.engine == "ours":
        from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer

        model = build(args, device, torch.bfloat16)
        init_weights(model)
        layer = Stack if args.unit_layers > 1 else Block
        units = [layer, nn.Embedding] if args.units == "all" else [layer]
        hybrid = {}
        if (
            args.outer
        ):  # half of the ranks shard, the other half repeats (no_shard) or shares the optimizer's state (optim)
            names = ("outer", "dp")
            mesh = dist.device_mesh.init_device_mesh("cuda", (2, dist.get_world_size() // 2), mesh_dim_names=names)
            hybrid = dict(
                device_mesh=mesh,
                dp_shard_dim="dp",
                dp_outer_dim="outer",
                outer_dp_sharding_strategy=args.outer,
                hybrid_fsdp_group=mesh[names]._flatten("all").get_group(),
            )
        model = fully_shard_model(
            model,
            fsdp_unit_modules=units,
            zero_dp_strategy=args.strategy,
            **hybrid,
            mixed_precision_policy=MixedPrecisionPolicy(
                main_params_dtype=torch.float32, main_grads_dtype=torch.float32, grad_comm_dtype=comm
            ),
            nccl_ub=args.nccl_ub,
            fsdp_double_buffer=args.double_buffer,
            overlap_grad_reduce=not args.plain,
            overlap_param_gather=not args.plain,
            residency_bytes=args.residency if args.residency == "auto" else int(float(args.residency)),
            copy_engine_gather=args.copy_engine,
            fsdp_db_use_persist_buf_on_alloc_fail=args.persist,
            sync_model_each_microbatch=args.accum == 1,
        )

        @contextlib.contextmanager
        def micro_ours(last):
            model.is_last_microbatch = last
            yield

        if args.exact_init:  # main weights from the unrounded values that FSDP2 starts from, not from the bf16 model
            full = build(args, device, torch.float32)
            init_weights(full)
            model.module.load_state_dict(full.state_dict())
            del full
        opt = fully_shard_optimizer(adam(model.parameters()))
        torch.cuda.empty_cache()
        return model, opt, micro_ours
    raise SystemExit(f"unknown engine {args.engine}")


def parser():
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
    ap.add_argument(
        "--outer", default="", choices=["", "no_shard", "optim"], help="ours: on a mesh of 2 x N/2, the outer axis so"
    )
    ap.add_argument("--plain", action="store_true", help="ours: nothing runs beside anything else")
    ap.add_argument("--copy-engine", action="store_true", help="ours: gather by copies out of the other GPUs' memory")
    ap.add_argument(
        "--residency", default="0", help="ours: bytes of weights that stay gathered through a step, or auto"
    )
    ap.add_argument("--steps", type=int, default=12)
    ap.add_argument("--warmup", type=int, default=4)
    ap.add_argument("--trace", default="")
    ap.add_argument(
        "--pretend-ranks", type=int, default=0, help="be the first of so many ranks, whose collectives do nothing"
    )
    ap.add_argument(
        "--exact-init", action="store_true", help="ours: start from the same fp32 weights as fsdp2, to compare losses"
    )
    return ap


def main():
    args = parser().parse_args()
    if args.steps <= args.warmup or min(args.mbs, args.seq, args.accum, args.unit_layers) < 1:
        raise SystemExit(
            f"error: --steps {args.steps} should be above --warmup {args.warmup}; --mbs, --seq, --accum, --unit-layers at least 1"
        )
    rank, local = (0, 0) if args.pretend_ranks else (int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    if args.pretend_ranks:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.pretend_ranks)
    else:
        dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(0)
    t0 = time.time()
    model, opt, micro = make_engine(args, device)
    vocab = SIZES[args.size][5]
    nparams = sum(math.prod(p.shape) for p in build(args, "meta", torch.bfloat16).parameters())
    init_s = time.time() - t0
    torch.cuda.reset_peak_memory_stats()
    g = torch.Generator(device=device).manual_seed(777 + rank)
    times, host_times, losses = [], [], []
    prof = None
    for step in range(args.steps):
        if args.trace and step == args.steps - 2:
            prof = torch.profiler.profile()
            prof.__enter__()
        torch.cuda.synchronize()
        dist.barrier()
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        issue_s = time.perf_counter()
        total = 0.0
        for m in range(args.accum):
            tokens = torch.randint(0, vocab, (args.mbs, args.seq + 1), device=device, generator=g)
            with micro(m == args.accum - 1):
                loss = model(tokens[:, :-1], tokens[:, 1:]) / args.accum
                loss.backward()
            total = total + loss.detach()
        opt.step()
        opt.zero_grad()
        b.record()
        issue_s = time.perf_counter() - issue_s
        torch.cuda.synchronize()
        if step >= args.warmup:
            times.append(a.elapsed_time(b))
            host_times.append(issue_s * 1e3)
        dist.all_reduce(total)
        losses.append(round(total.item() / dist.get_world_size(), 5))
    if prof is not None:
        prof.__exit__(None, None, None)
        if rank == 0:
            prof.export_chrome_trace(args.trace)
    med = torch.tensor(statistics.median(times), device=device)
    dist.all_reduce(med, op=dist.ReduceOp.MAX)
    stats = torch.tensor(
        [torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30], device=device
    )
    dist.all_reduce(stats, op=dist.ReduceOp.MAX)
    if rank == 0:
        h, f, layers, n, kv, _ = SIZES[args.size]
        tok = args.mbs * args.seq * args.accum
        flops = (6 * nparams + 6 * layers * h * args.seq) * tok  # dense + causal attention (12*L*h*s/2)
        s = med.item() / 1e3
        print(
            "RESULT "
            + json.dumps(
                dict(
                    engine=args.engine,
                    size=args.size,
                    gpus=dist.get_world_size(),
                    seq=args.seq,
                    mbs=args.mbs,
                    accum=args.accum,
                    strategy=args.strategy,
                    comm=args.grad_comm,
                    units=args.units,
                    unit_layers=args.unit_layers,
                    ub=args.nccl_ub,
                    db=args.double_buffer,
                    residency=args.residency,
                    copies=args.copy_engine,
                    rc=args.recompute,
                    pretended=bool(args.pretend_ranks),
                    step_ms=round(med.item(), 1),
                    min_ms=round(min(times), 1),
                    max_ms=round(max(times), 1),
                    host_ms=round(statistics.median(host_times), 1),
                    tok_s_gpu=round(tok / s),
                    mfu=round(flops / s / PEAK_BF16, 4),
                    alloc_gib=round(stats[0].item(), 2),
                    reserved_gib=round(stats[1].item(), 2),
                    init_s=round(init_s, 1),
                    params_b=round(nparams / 1e9, 3),
                    loss=[losses[0], losses[len(losses) // 2], losses[-1]],
                )
            ),
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
