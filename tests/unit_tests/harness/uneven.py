"""DTensors whose shards are cut anywhere, and what they are made of."""

import functools
import random

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from megatron_fsdp import uneven_dtensor as uneven
from megatron_fsdp.machine.torch_compat import strided_shard

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
DTYPES += [torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]
MESH_SHAPES = {2: [(2,), (1, 2)], 3: [(3,)], 4: [(4,), (2, 2), (2, 1, 2)]}


@functools.cache
def mesh_of(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple(f"axis{i}" for i in range(len(shape))))


def placements_for(mesh: DeviceMesh, cuts: dict[int, list[int]]) -> list:
    """Placements that cut each dim by its axes, the coarsest cut first."""
    placements = [Replicate() for _ in range(mesh.ndim)]
    for dim, axes in cuts.items():
        for position, axis in enumerate(axes):
            factor = 1
            for earlier in axes[:position]:
                factor *= mesh.size(earlier) if earlier > axis else 1
            placements[axis] = Shard(dim) if factor == 1 else strided_shard(dim, factor)
    return placements


def box_of(shape, mesh: DeviceMesh, cuts: dict[int, list[int]], seed: int) -> list[tuple[int, int]]:
    """This rank's (low, high) in every dim; cut points are random, often equal, and the same for all ranks."""
    box = [(0, extent) for extent in shape]
    for dim, axes in cuts.items():
        path: tuple[int, ...] = ()
        for axis in axes:
            low, high = box[dim]
            generator = random.Random(f"{seed} {dim} {axis} {path}")
            inner = sorted(generator.randint(low, high) for _ in range(mesh.size(axis) - 1))
            at = mesh.get_local_rank(axis)
            box[dim] = tuple([low, *inner, high][at : at + 2])
            path += (at,)
    return box


def sharded(full: torch.Tensor, mesh: DeviceMesh, cuts: dict[int, list[int]], seed: int) -> tuple[DTensor, list]:
    box = box_of(full.shape, mesh, cuts, seed)
    local = full[tuple(slice(low, high) for low, high in box)].clone()
    placements = placements_for(mesh, cuts)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()), box


def rows(full: torch.Tensor, counts: list[int], mesh: DeviceMesh | None = None, attach: bool = False) -> DTensor:
    """`full` on a 1-D mesh with so many rows at each rank."""
    mesh = mesh or mesh_of(len(counts))
    at, start = mesh.get_local_rank(0), sum(counts[: mesh.get_local_rank(0)])
    local = full[start : start + counts[at]].clone()
    placements = [Shard(0), *[Replicate()] * (mesh.ndim - 1)]
    result = DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())
    if attach:
        uneven.attach_chunk_metadata(result, (start, *[0] * (full.dim() - 1)), local.shape)
    return result


def values(shape, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.float(), b.float()) if a.dtype.itemsize == 1 else torch.equal(a, b)


def random_cuts(generator: random.Random, ndim: int, mesh: DeviceMesh) -> dict[int, list[int]]:
    """Every mesh axis replicates or cuts some dim, in any order."""
    cuts: dict[int, list[int]] = {}
    for axis in generator.sample(range(mesh.ndim), mesh.ndim):
        dim = generator.randint(-1, ndim - 1)
        if dim >= 0:
            cuts.setdefault(dim, []).append(axis)
    return cuts


# ---- where the shards lie, and the full tensor ----
