"""Jobs of one GPU rank; launched by torchrun, named on the command line; rank 0 prints one JSON line."""

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from megatron_fsdp import (
    DistributedDataParallelConfig,
    FSDPDistributedIndex,
    MegatronFSDP,
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
)
from megatron_fsdp.machine.allocator import StoragePool
from megatron_fsdp.runtime import linear_grads
from megatron_fsdp.state import main_grad
from tests.unit_tests.harness.poison_pool import PoisonPool

VOCAB, WIDTH = 1300, 257


def model(width: int = WIDTH, depth: int = 6) -> nn.Module:
    """Embedding, blocks of odd widths, output layer."""
    blocks = [nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)) for _ in range(depth)]
    return nn.Sequential(nn.Embedding(VOCAB, width), *blocks, nn.Linear(width, VOCAB, bias=False))


def loss_of(module: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Cross entropy in fp32."""
    inputs, target = batch
    return F.cross_entropy(module(inputs).float().flatten(0, 1), target.flatten())


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)


def parity(strategy: int, poisoned: bool, with_units: bool) -> float:
    """The largest relative error of a gradient over 3 steps of 2 micro-batches, against the whole batch on one GPU."""
    rank, world = dist.get_rank(), dist.get_world_size()
    MegatronFSDP.pool_class = PoisonPool if poisoned else StoragePool
    torch.manual_seed(0)
    reference = model().cuda()
    torch.manual_seed(rank)  # ranks must agree on the first one's values
    ours = model().cuda()
    if rank == 0:
        ours.load_state_dict(reference.state_dict())
    units = [nn.Linear, nn.Embedding] if with_units else None
    # Not Adam: its first steps move by the sign of a gradient, which makes rounding as large as the learning rate.
    ours, optimizer = fully_shard(ours, sgd(ours), zero_dp_strategy=strategy, fsdp_unit_modules=units)
    theirs = sgd(reference)
    generator = torch.Generator().manual_seed(5)
    worst = 0.0
    for _ in range(3):
        for _ in range(2):
            inputs, target = (torch.randint(0, VOCAB, (world, 64, 3), generator=generator).cuda() for _ in range(2))
            sum(loss_of(reference, (inputs[r], target[r])) for r in range(world)).div(world).backward()
            loss_of(ours, (inputs[rank], target[rank])).backward()
        for param, expected in zip(ours.parameters(), reference.parameters(), strict=True):
            error = (param.grad.full_tensor() - expected.grad).norm() / expected.grad.norm()
            worst = max(worst, error.item())
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        torch.testing.assert_close(ours.clip_grad_norm_(0.5), norm, rtol=1e-4, atol=1e-5)
        for each in (optimizer, theirs):
            each.step()
            each.zero_grad()
    return worst


def low_precision(strategy: int, comm: str) -> list[float]:
    """Losses of 6 bf16 steps with fp32 main weights and gradients."""
    comm_dtype = getattr(torch, comm)
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(main_grads_dtype=torch.float32, grad_comm_dtype=comm_dtype)
    ours = fully_shard_model(
        model().bfloat16().cuda(),
        fsdp_unit_modules=[nn.Sequential],
        zero_dp_strategy=strategy,
        mixed_precision_policy=policy,
    )
    optimizer = fully_shard_optimizer(torch.optim.AdamW(ours.parameters(), lr=1e-3, fused=True))
    generator = torch.Generator().manual_seed(dist.get_rank())
    batch = tuple(torch.randint(0, VOCAB, (64, 3), generator=generator).cuda() for _ in range(2))
    losses = []
    for _ in range(6):
        loss = loss_of(ours, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def in_place(comm: str) -> dict[str, Any]:
    """Weights whose gradients were copied, and losses, as they are and with every gradient copied."""
    copy_all, copied, found = main_grad.foreach_copy_, [0], {}

    def count(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        copied[0] += sum(source.dim() == 2 for source in sources)
        copy_all(targets, sources)

    main_grad.foreach_copy_ = count
    for name, least in (("lent", 1), ("copied", 2**62)):
        linear_grads.LEAST_NUMEL, copied[0] = least, 0
        losses = low_precision(3, comm)
        found[name] = {"weights": copied[0], "losses": losses}
    main_grad.foreach_copy_, linear_grads.LEAST_NUMEL = copy_all, 1
    return found


def scaled(by: str) -> int:
    """Elements of bf16 gradients, clipped or scaled by a third, that were not rounded once from fp32."""
    ours = fully_shard_model(model(depth=1).bfloat16().cuda(), fsdp_unit_modules=[nn.Sequential])
    loss_of(ours, tuple(torch.randint(0, VOCAB, (8, 3)).cuda() for _ in range(2))).backward()
    before = [param.grad.to_local().float() for param in ours.parameters()]
    if by == "clip_grad_norm_":
        norm = ours.clip_grad_norm_(1e9)
        ours.clip_grad_norm_(norm.item() / 3)
        factor = norm.item() / 3 / (norm + 1e-6)
    else:
        factor = torch.tensor(1 / 3, device="cuda")
        ours.scale_gradients(factor)
    after = [param.grad.to_local() for param in ours.parameters()]
    return sum(int((grad != (old * factor).bfloat16()).sum()) for old, grad in zip(before, after, strict=True))


def overlap(strategy: int) -> dict[str, float]:
    """The overlap report of 3 steps once training is warm, and milliseconds by the host's clock."""
    ours = fully_shard_model(model().bfloat16().cuda(), fsdp_unit_modules=[nn.Sequential], zero_dp_strategy=strategy)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(ours.parameters(), lr=1e-3, fused=True))
    batch = tuple(torch.randint(0, VOCAB, (64, 3)).cuda() for _ in range(2))

    def steps() -> None:
        for _ in range(3):
            loss_of(ours, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    steps()
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    with ours.overlap_report() as report:
        steps()
    elapsed_ms = (time.perf_counter() - began_s) * 1000
    total = report.total
    return {
        "elapsed_ms": elapsed_ms,
        "compute_ms": total.compute_ms,
        "exposed_ms": total.exposed_ms,
        "gather_ms": total.gather_ms,
        "reduce_ms": total.reduce_ms,
        "allocated": report.peak_memory.allocated,
        "least_ms": min(min(row.compute_ms, row.exposed_ms) for row in report.rows),
    }


def resting_memory(strategy: int) -> dict[str, float]:
    """Bytes allocated between steps over what the groups say they hold, and the peak of a step above it."""
    torch.manual_seed(0)
    probe = nn.Linear(64, 64, device="cuda", dtype=torch.bfloat16)
    probe(torch.ones(4, 64, device="cuda", dtype=torch.bfloat16)).sum().backward()
    probe = None  # cuBLAS keeps its workspaces, which are not ours
    baseline = torch.cuda.memory_allocated()
    ours = fully_shard_model(
        model(2048, 8).bfloat16().cuda(), fsdp_unit_modules=[nn.Sequential], zero_dp_strategy=strategy,
        mixed_precision_policy=MixedPrecisionPolicy(main_grads_dtype=torch.float32), sync_model_each_microbatch=False,
    )  # fmt: skip
    optimizer = fully_shard_optimizer(torch.optim.SGD(ours.parameters(), lr=1e-3))
    unit = 2 * 2048 * 8192 * 2
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        batch = tuple(torch.randint(0, VOCAB, (4, 3), device="cuda") for _ in range(2))
        loss_of(ours, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    groups = ours.param_and_grad_buffer.parameter_groups
    held, grads = sum(group.persistent_nbytes for group in groups), sum(group.grad_nbytes for group in groups)
    resting, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    return {"excess": (resting - baseline - held) / held, "peak_units": (peak - resting - grads) / unit}


def buffered(strategy: int, comm: str, options: dict[str, bool]) -> dict[str, Any]:
    """Losses, what the allocator did from the third step on, and what was registered, of 8 steps with `options`."""
    gc.collect()  # what the case before has left
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    index = FSDPDistributedIndex(init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("dp",)), "dp")
    config = DistributedDataParallelConfig(data_parallel_sharding_strategy=strategy, **options)
    policy = MixedPrecisionPolicy(main_grads_dtype=torch.float32, grad_comm_dtype=getattr(torch, comm))
    units = [nn.Sequential, nn.Embedding]
    ours = MegatronFSDP(model(2048, 8).bfloat16().cuda(), index, config, policy, fsdp_unit_modules=units)
    optimizer = fully_shard_optimizer(torch.optim.SGD(ours.parameters(), lr=0.1))
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses, reserved = [], []
    for step in range(8):
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
        batch = tuple(torch.randint(0, VOCAB, (64, 32), generator=generator).cuda() for _ in range(2))
        loss = loss_of(ours, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
        reserved.append(torch.cuda.memory_reserved())
        if step == 0 and options.get("fsdp_manual_registration"):
            ours.param_and_grad_buffer.manual_buffer_registration()
    pool = ours.param_and_grad_buffer._pool
    memory = getattr(pool, "memory", None)
    return {
        "losses": losses,
        "growth": max(reserved[2:]) - reserved[1],
        "reserved_over_allocated": torch.cuda.max_memory_reserved() / torch.cuda.max_memory_allocated(),
        "overflows": getattr(pool, "overflows", None),
        "regions": len(getattr(memory, "_pools", ())),
        "registrations": getattr(memory, "registrations", 0),
        "windows": getattr(memory, "windows", 0),
        "nccl": list(torch.cuda.nccl.version()),
    }


def gathered(dtype: str, strategy: int, options: dict[str, Any]) -> dict[str, Any]:
    """Losses of 6 steps of 2 micro-batches with `options`, bytes that peers read, and bytes given back at the end."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    ours: Any = fully_shard_model(
        model(1024).to(getattr(torch, dtype)).cuda(), fsdp_unit_modules=[nn.Sequential, nn.Embedding],
        zero_dp_strategy=strategy, sync_model_each_microbatch=False, **options,
    )  # fmt: skip
    optimizer: Any = fully_shard_optimizer(torch.optim.AdamW(ours.parameters(), lr=1e-3, fused=True))
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(6):
        for is_last in (False, True):
            ours.is_last_microbatch = is_last
            batch = tuple(torch.randint(0, VOCAB, (64, 32), generator=generator).cuda() for _ in range(2))
            loss = loss_of(ours, batch)
            loss.backward()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(total.item() / dist.get_world_size())
        optimizer.step()
        optimizer.zero_grad()
    gathers = {group.spec.peers for group in ours.param_and_grad_buffer.parameter_groups} - {None}
    offered = sum(gather.nbytes for gather in gathers)
    dist.barrier()
    before = _not_torchs()
    del ours, optimizer, loss, gathers
    dist.barrier()  # what a peer still maps is not free
    torch.cuda.synchronize()
    return {"losses": losses, "offered": offered, "given_back": before - _not_torchs()}


def _not_torchs() -> int:
    """Bytes of the device in use that torch's caching allocator has not reserved."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


JOBS: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (parity, low_precision, in_place, scaled, overlap, resting_memory, buffered, gathered)
}


def main() -> None:
    """Runs JOB with JSON arguments, for each line of arguments given."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    torch.backends.cuda.matmul.allow_tf32 = False
    linear_grads.LEAST_NUMEL = 1  # the models here are small
    results = [JOBS[sys.argv[1]](*json.loads(arguments)) for arguments in sys.argv[2:]]
    if dist.get_rank() == 0:
        print("RESULTS " + json.dumps(results), flush=True)  # noqa: T201  (the test reads it)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
