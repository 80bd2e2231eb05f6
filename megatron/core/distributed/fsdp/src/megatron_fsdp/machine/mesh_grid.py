"""Checks of a mesh's table of ranks: groups see it as the grid it is, and no dimension was forgotten."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)


def check_ascending(mesh: DeviceMesh, mesh_name: str, dims: Sequence[str]) -> None:
    """Checks that ranks ascend along every one of `dims`, everywhere in the mesh, where these make a grid.

    torch sorts the ranks inside a group, so only then is a rank's number in every dimension's group its coordinate, and
    only then do the ranks of one number along one dimension meet in one group along another. One dimension alone has
    nothing to agree with, so its ranks may have any order.

    Raises:
        ValueError: they do not; on every rank of the mesh, whether or not its own groups are in order.
    """
    used = [dim for dim in dims if mesh[dim].size() > 1]
    for dim in used if len(used) > 1 else ():
        rows, _ = _rows_along(mesh, dim)
        wrong = [row for row in rows.tolist() if row != sorted(row)]
        if wrong:
            raise ValueError(
                f"{mesh_name} has ranks {wrong[0]} along {dim!r}, in this order; where several dimensions are used, "
                "ranks must ascend along each, because torch sorts the ranks of a group. Make the mesh with "
                f"init_device_mesh({mesh.device_type!r}, {tuple(mesh.mesh.shape)}, mesh_dim_names="
                f"{mesh.mesh_dim_names}), or from a table of ranks that ascends along every dimension, as "
                "torch.arange(n).view(...).permute(...) does."
            )


def warn_of_unnamed(mesh: DeviceMesh, dims: Sequence[str]) -> None:
    """Logs a warning, on the mesh's first rank, about dimensions of several ranks that none of `dims` covers."""
    covered = {position for dim in dims for position in _rows_along(mesh, dim)[1]}
    if dist.get_rank() != int(mesh.mesh.flatten()[0]):
        return
    for position, (dim, size) in enumerate(zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=True)):
        if size > 1 and position not in covered:
            logger.warning(
                "dimension %r of device_mesh has %d ranks, and none of dp_shard_dim, dp_outer_dim and tp_dim is or "
                "covers it: its %d ranks start from and train %d different models. If they should train one, pass it "
                "as dp_outer_dim with hybrid_fsdp_group, or as tp_dim, or _flatten() it with the shard dimension and "
                "pass the name of both. If not (pipeline stages), pass the sub-mesh of the dimensions that are named.",
                dim,
                size,
                size,
                size,
            )


def _rows_along(mesh: DeviceMesh, dim: str) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Everybody's ranks along a dimension, (rows, ranks of a row), and the positions of the dimensions that it covers.

    A flattened dimension is in no mesh's table, but this rank's row of it is: the way that row takes through the table
    is every row's.
    """
    table, own = mesh.mesh, mesh[dim].mesh.flatten()
    places = [(table == rank).nonzero() for rank in own]
    if any(len(place) != 1 for place in places):
        return own.unsqueeze(0), ()  # flattened over dimensions that this sub-mesh does not have
    way = torch.cat(places)
    moving = [position for position in range(table.dim()) if way[:, position].unique().numel() > 1]
    resting = [position for position in range(table.dim()) if position not in moving]
    shape = [table.shape[position] for position in moving]
    rows = table.permute(*resting, *moving).flatten(end_dim=len(resting) - 1) if resting else table.unsqueeze(0)
    rows = rows.reshape(rows.shape[0], -1)
    order = torch.zeros_like(way[:, 0])
    for position, size in zip(moving, shape, strict=True):
        order = order * size + way[:, position]
    return rows[:, order], tuple(moving)
