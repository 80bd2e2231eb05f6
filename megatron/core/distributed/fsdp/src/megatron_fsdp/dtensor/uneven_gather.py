"""Exchange of an unevenly sharded DTensor's boxes and elements between ranks."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from megatron_fsdp.dtensor.chunk_metadata import Cut, cuts_of, cutting_axes
from megatron_fsdp.machine.collectives import largest
from megatron_fsdp.machine.torch_compat import all_gather_single, local_tensor


def compute_chunks(dtensors: Sequence[DTensor], names: Sequence[str]) -> list[ChunkStorageMetadata]:
    """This rank's boxes, worked out from everybody's local shapes. **Collective** over each tensor's mesh.

    All ranks of a mesh must pass the same tensors in the same order; `names` are there to check that. Per mesh and cut
    order it costs one all-gather on each sharding axis, whatever the number of tensors (an integer each), and two small
    ones more per axis of the mesh for checks. Raises ValueError, on all ranks of a mesh, if their lists differ or the
    local shapes do not add up to the global one.
    """
    by_mesh: dict[DeviceMesh, dict[tuple[Cut, ...], list[int]]] = {}
    cuts = [cuts_of(dtensor) for dtensor in dtensors]
    for index, dtensor in enumerate(dtensors):
        by_mesh.setdefault(dtensor.device_mesh, {}).setdefault(tuple(cuts[index]), []).append(index)
    offsets = [[0] * dtensor.ndim for dtensor in dtensors]
    for mesh, by_cuts in by_mesh.items():
        members = sorted(index for indices in by_cuts.values() for index in indices)
        _check_agreement(mesh, [dtensors[i] for i in members], [names[i] for i in members], [cuts[i] for i in members])
        wrong: list[int] = []
        for group_cuts, indices in by_cuts.items():
            for cut in group_cuts:
                starts, totals = _exchange(mesh, cut, [local_tensor(dtensors[i]).shape[cut.dim] for i in indices])
                for index, start, total in zip(indices, starts, totals, strict=True):
                    offsets[index][cut.dim] = start
                    if total != dtensors[index].shape[cut.dim] and not _is_fake(mesh):
                        wrong.append(index)
        if largest_on(mesh, [len(wrong)])[0]:
            shapes = {names[i]: (tuple(dtensors[i].shape), tuple(local_tensor(dtensors[i]).shape)) for i in wrong[:5]}
            raise ValueError(
                f"The local shapes do not add up to the global ones; (global, this rank's) shapes: {shapes}. "
                "Pass the true shape= and stride= to DTensor.from_local."
            )
    sizes = [local_tensor(dtensor).shape for dtensor in dtensors]
    return [ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in zip(offsets, sizes, strict=True)]


def _check_agreement(mesh: DeviceMesh, dtensors: list[DTensor], names: list[str], cuts: list[list[Cut]]) -> None:
    """Raises ValueError on all ranks of the mesh if they hold different lists of tensors. **Collective.**"""
    described, has_wrong_shape = hashlib.sha256(), False
    for dtensor, name, its_cuts in zip(dtensors, names, cuts, strict=True):
        described.update(repr((name, tuple(dtensor.shape), its_cuts)).encode())
        cut_dims = {cut.dim for cut in its_cuts}
        pairs = enumerate(zip(local_tensor(dtensor).shape, dtensor.shape, strict=True))
        has_wrong_shape |= any(mine != whole for dim, (mine, whole) in pairs if dim not in cut_dims)
    digest = int.from_bytes(described.digest()[:7], "big")
    count = len(dtensors)
    most, fewest, high, low, is_wrong = largest_on(mesh, [count, -count, digest, -digest, int(has_wrong_shape)])
    if most != -fewest or high != -low:
        raise ValueError(
            f"Ranks of one mesh {mesh} hold different DTensors (from {-fewest} to {most} of them; names, global shapes "
            f"and placements must agree): this rank has {count}, the first ones {names[:5]}. Give every rank the same "
            "keys, with empty shards where it owns nothing."
        )
    if is_wrong:
        raise ValueError(
            "A local shape differs from the global one in a dim that no mesh axis cuts. "
            "Pass the true shape= and stride= to DTensor.from_local."
        )


def _exchange(mesh: DeviceMesh, cut: Cut, extents: list[int]) -> tuple[list[int], list[int]]:
    """Start and total of each tensor's extents along one cut, finest axis first. **Collective** over the cut's axes."""
    total = torch.tensor(extents, dtype=torch.int64, device=mesh.device_type)
    start = torch.zeros_like(total)
    for axis in reversed(cut.axes):
        table = gather_over_axes(total, mesh, [axis])
        start += table[: mesh.get_local_rank(axis)].sum(dim=0)
        total = table.sum(dim=0)
    return start.tolist(), total.tolist()


def gather_over_axes(tensor: torch.Tensor, mesh: DeviceMesh, axes: Sequence[int]) -> torch.Tensor:
    """Everybody's `tensor` (equal shapes), stacked: (ranks, *shape), last axis slowest. **Collective** on each axis."""
    stacked = tensor.unsqueeze(0)
    for axis in axes:
        peers = mesh.size(axis)
        # A fake backend writes nothing; this way it pretends that all peers are like us.
        out = stacked.repeat(peers, *[1] * tensor.dim())
        if peers > 1:
            all_gather_single(out, stacked.contiguous(), group=mesh.get_group(axis))
        stacked = out
    return stacked


def largest_on(mesh: DeviceMesh, values: Sequence[int]) -> list[int]:
    """The largest of each of the integers over all ranks of the mesh. **Collective** on each axis longer than 1."""
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    return largest(values, groups, mesh.device_type)


def check_cover(dtensor: DTensor, chunk: ChunkStorageMetadata, error: type[Exception]) -> None:
    """Raises `error`, on all ranks that cut the tensor, unless their boxes tile it. **Collective** over those axes."""
    mesh, ndim = dtensor.device_mesh, dtensor.ndim
    axes = cutting_axes(dtensor)
    if _is_fake(mesh):
        return
    mine = torch.tensor([*chunk.offsets, *chunk.sizes], dtype=torch.int64, device=mesh.device_type)
    table = gather_over_axes(mine, mesh, axes).cpu()
    starts, sizes = table[:, :ndim], table[:, ndim:]
    shape = torch.tensor(tuple(dtensor.shape), dtype=torch.int64)
    if bool(((starts < 0) | (sizes < 0) | (starts + sizes > shape)).any()):
        raise error(f"Chunks reach outside the tensor of shape {tuple(dtensor.shape)}: {_boxes(table)}.")
    filled = sizes.prod(dim=1) > 0
    starts, ends = starts[filled], (starts + sizes)[filled]
    overlap = ((starts[:, None] < ends[None]) & (starts[None] < ends[:, None])).all(dim=-1)
    if int(overlap.sum()) > len(starts):
        raise error(f"Chunks of the tensor of shape {tuple(dtensor.shape)} overlap: {_boxes(table)}.")
    if int((ends - starts).prod(dim=1).sum()) != dtensor.numel():
        raise error(f"Chunks leave a part of the tensor of shape {tuple(dtensor.shape)} uncovered: {_boxes(table)}.")


def _boxes(table: torch.Tensor) -> str:
    ndim = table.shape[1] // 2
    shown = [f"{row[:ndim]}+{row[ndim:]}" for row in table[:8].tolist()]
    return ", ".join(shown) + (", ..." if len(table) > len(shown) else "")


def _is_fake(mesh: DeviceMesh) -> bool:
    return any(dist.get_backend(mesh.get_group(axis)) == "fake" for axis in range(mesh.ndim))


@torch.no_grad()
def gather_rows(local: torch.Tensor, rows_per_rank: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """All ranks' rows in rank order, shape (sum(rows_per_rank), *rest), any dtype. **Collective** over `group`.

    `rows_per_rank` is the same on all ranks and says how many rows (dim 0) each one brings. Rows travel as bytes,
    padded to the longest shard (backends want equal parts, and gloo has no float8). Where padding would cost more than
    an exact exchange, e.g. one rank owns everything, they are summed into place instead.
    """
    rows = list(rows_per_rank)
    rank, peers = dist.get_rank(group), dist.get_world_size(group)
    if local.dim() == 0 or len(rows) != peers or local.shape[0] != rows[rank]:
        raise ValueError(f"Expected rows per rank of {peers} ranks, rank {rank} with shape {local.shape}; got {rows}.")
    total, longest, rest = sum(rows), max(rows), local.shape[1:]
    row_nbytes = rest.numel() * local.element_size()
    mine = _as_bytes(local.contiguous()).view(rows[rank], row_nbytes)
    if peers * longest > 2 * total:
        box = ChunkStorageMetadata(torch.Size([sum(rows[:rank]), 0]), mine.shape)
        whole = sum_into_place(mine, box, (total, row_nbytes), [group])
    else:
        padded = mine.new_zeros((longest, row_nbytes))
        padded[: rows[rank]] = mine
        gathered = mine.new_empty((peers, longest, row_nbytes))
        if padded.numel():
            all_gather_single(gathered.view(-1), padded.view(-1), group=group)
        whole = torch.cat([gathered[peer, :count] for peer, count in enumerate(rows)])
    return whole.view(-1).view(local.dtype).view(total, *rest)


@torch.no_grad()
def sum_into_place(
    local: torch.Tensor, chunk: ChunkStorageMetadata, shape: Sequence[int], groups: Sequence[dist.ProcessGroup]
) -> torch.Tensor:
    """The full tensor, each rank bringing the box `chunk` of it; bit-exact. **Collective** over each group in turn.

    Bytes of disjoint boxes are added to zeros: unlike padding to the largest box this needs no more memory than the
    result.
    """
    shape = torch.Size(shape)
    as_bytes = torch.zeros(shape.numel() * local.element_size(), dtype=torch.uint8, device=local.device)
    full = as_bytes.view(local.dtype).view(shape)
    # Not every backend copies one-byte floats; their bytes are as good.
    copied = torch.uint8 if local.element_size() == 1 else local.dtype
    window: Any = full.view(copied)
    place = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
    window[place] = local.contiguous().view(copied)
    for group in groups:
        if as_bytes.numel() and dist.get_world_size(group) > 1:
            dist.all_reduce(as_bytes, group=group)
    return full


def _as_bytes(contiguous: torch.Tensor) -> torch.Tensor:
    return contiguous.view(-1).view(torch.uint8)
