"""`FSDPDistributedIndex`: axis names to process groups, for dense and expert parameters."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp.machine.collectives import Axis

logger = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False, repr=False)
class FSDPDistributedIndex:
    """Finds the meshes and process groups of every parallel axis by name.

    Args:
        device_mesh: mesh of the dense parameters; must name every dimension given below.
        dp_shard_dim: dimension over which parameters are sharded (often the flattened data x context one).
        dp_outer_dim: outer data-parallel dimension; its presence turns hybrid sharding on.
        tp_dim: tensor-parallel dimension. Its ranks have different parts of parameters, or copies, and one batch.
        hybrid_fsdp_group: all ranks of (outer, shard); required with `dp_outer_dim`.
        hybrid_fsdp_expt_group: the same for expert parameters.
        hsdp_outer_dp_shard: the outer axis shards the optimizer state.
        expt_device_mesh: mesh of the expert parameters, with the same dimension names.
        fsdp_group_ag: communicator for gathers, over the same ranks as the shard dimension.
        expt_fsdp_group_ag: the same for expert parameters.

    Raises:
        ValueError: a dimension is missing from a mesh or means two axes, one of `dp_outer_dim` and `hybrid_fsdp_group`
            (`hybrid_fsdp_expt_group`, with an expert mesh) is missing, a group has other ranks than its dimension,
            ranks do not ascend along a dimension of a mesh with several, or experts are spread over ranks that are no
            dense data-parallel ones.
    """

    device_mesh: DeviceMesh
    dp_shard_dim: str | None = None
    dp_outer_dim: str | None = None
    tp_dim: str | None = None
    hybrid_fsdp_group: dist.ProcessGroup | None = None
    hybrid_fsdp_expt_group: dist.ProcessGroup | None = None
    hsdp_outer_dp_shard: bool = False
    expt_device_mesh: DeviceMesh | None = None
    fsdp_group_ag: dist.ProcessGroup | None = None
    expt_fsdp_group_ag: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        self._check_names()
        dims = [dim for dim in (self.dp_outer_dim, self.dp_shard_dim, self.tp_dim) if dim is not None]
        for is_expert, mesh in self._meshes.items():
            _check_ascending(mesh, _MESH_NAMES[is_expert], dims)
        _warn_of_unnamed(self.device_mesh, dims)
        self.mesh_library = self._register_submeshes()
        self.fsdp_group = _group(self.device_mesh, self.dp_shard_dim)
        self.outer_fsdp_group = _group(self.device_mesh, self.dp_outer_dim)
        self.expt_fsdp_group = _group(self.expt_device_mesh, self.dp_shard_dim)
        self.expt_outer_fsdp_group = _group(self.expt_device_mesh, self.dp_outer_dim)
        self._check_groups()

    def __deepcopy__(self, memo: dict) -> FSDPDistributedIndex:
        return self  # process groups cannot be copied; parameters carry this object, and can

    @property
    def use_hybrid_fsdp(self) -> bool:
        """There is an outer data-parallel axis."""
        return self.dp_outer_dim is not None

    @property
    def _meshes(self) -> dict[bool, DeviceMesh]:
        """The meshes that were given, by `is_expert`."""
        meshes = {False: self.device_mesh, True: self.expt_device_mesh}
        return {is_expert: mesh for is_expert, mesh in meshes.items() if mesh is not None}

    def _check_names(self) -> None:
        if self.dp_shard_dim is None:
            raise ValueError("dp_shard_dim is None; name the dimension of device_mesh over which to shard parameters.")
        for is_expert, mesh in self._meshes.items():
            if mesh.get_coordinate() is None:
                raise ValueError(
                    f"rank {dist.get_rank()} is not in {_MESH_NAMES[is_expert]}, which has ranks "
                    f"{mesh.mesh.flatten().tolist()}; only ranks that share the model build it."
                )
        if self.use_hybrid_fsdp != (self.hybrid_fsdp_group is not None):
            names = ("dp_outer_dim", "hybrid_fsdp_group")
            given, missing = names if self.use_hybrid_fsdp else reversed(names)
            raise ValueError(f"{given} is given without {missing}; hybrid sharding needs both, plain sharding neither.")
        absent = [name for name in ("dp_outer_dim", "expt_device_mesh") if getattr(self, name) is None]
        if self.hybrid_fsdp_expt_group is not None and absent:
            raise ValueError(
                f"hybrid_fsdp_expt_group is given without {' and '.join(absent)}; it is all the ranks of outer x "
                "shard of the expert mesh, so pass all three or leave it out."
            )
        option_of: dict[str, str] = {}
        for option in ("dp_shard_dim", "dp_outer_dim", "tp_dim"):
            dim = getattr(self, option)
            if dim is None:
                continue
            twin = option_of.setdefault(dim, option)
            if twin != option:
                raise ValueError(f"{twin} and {option} are both {dim!r}; every axis needs a dimension of its own.")
            for is_expert, mesh in self._meshes.items():
                try:
                    mesh[dim]  # dimensions made by `_flatten` are found by indexing only
                except KeyError:
                    raise ValueError(
                        f"{option}={dim!r} is not a dimension of {_MESH_NAMES[is_expert]}, which has "
                        f"{mesh.mesh_dim_names}; name the dimensions when the mesh is made, or flatten the ones you "
                        "mean first."
                    ) from None

    def _register_submeshes(self) -> dict[tuple[str | bool | None, ...], DeviceMesh]:
        outer, shard, tp = self.dp_outer_dim, self.dp_shard_dim, self.tp_dim
        combinations = [(tp,), (outer, shard, tp), (shard, tp), (outer, shard), (shard,)]
        library: dict[tuple[str | bool | None, ...], DeviceMesh] = {}
        for is_expert, mesh in self._meshes.items():
            for dims in (tuple(dim for dim in dims if dim is not None) for dims in combinations if None not in dims):
                with contextlib.suppress(KeyError, RuntimeError):  # torch slices dimensions in the mesh's own order
                    library[dims + (is_expert,)] = mesh[dims]
        return library

    def _check_groups(self) -> None:
        if self.use_hybrid_fsdp:
            self._check_hybrid("hybrid_fsdp_group", is_expert=False)
            if self.expt_device_mesh is not None:
                self._check_hybrid("hybrid_fsdp_expt_group", is_expert=True)
        for option, is_expert in (("fsdp_group_ag", False), ("expt_fsdp_group_ag", True)):
            group, gather = self.get_fsdp_group(is_expert), getattr(self, option)
            if gather is not None and (group is None or _ranks(gather) != _ranks(group)):
                raise ValueError(f"{option} must hold the same ranks, in the same order, as the shard dimension's.")
        if self.expt_device_mesh is None or (self.tp_dim is not None and self.get_submesh(self.tp_dim).size() > 1):
            return
        # Experts are spread over some of the ranks that average dense gradients, which all see the experts' tokens.
        dense, experts = (_ranks(self.get_dp_group(is_expert)) for is_expert in (False, True))
        if not set(experts) <= set(dense) or len(dense) % len(experts):
            raise ValueError(
                f"expt_device_mesh spreads this rank's experts over ranks {experts}, of which device_mesh's data-"
                f"parallel ranks {dense} must be a multiple: data-parallel size = expert-parallel size x expert "
                "data-parallel size."
            )

    def _check_hybrid(self, option: str, *, is_expert: bool) -> None:
        """Checks one mesh's group of all (outer, shard) ranks, and that torch can slice the two dimensions together."""
        mesh_name, group = _MESH_NAMES[is_expert], getattr(self, option)
        if group is None:
            raise ValueError(f"{mesh_name} and dp_outer_dim need {option}: all its ranks of outer x shard.")
        mesh = self.mesh_library.get((self.dp_outer_dim, self.dp_shard_dim, is_expert))
        if mesh is None:
            raise ValueError(
                f"{mesh_name} with dimensions {self._meshes[is_expert].mesh_dim_names} has no sub-mesh of "
                f"({self.dp_outer_dim!r}, {self.dp_shard_dim!r}); the outer dimension must come first, and not overlap."
            )
        own, wanted = sorted(_ranks(group)), sorted(mesh.mesh.flatten().tolist())
        if own != wanted:
            raise ValueError(
                f"{option} has ranks {own}; expected {wanted}: all ranks of {self.dp_outer_dim!r} x "
                f"{self.dp_shard_dim!r} of {mesh_name}."
            )

    def get_submesh(self, mesh_dim_names: str | tuple[str | None, ...], is_expert_parallel: bool = False) -> DeviceMesh:
        """The mesh of these dimensions.

        Raises:
            ValueError: the combination was not registered at construction.
        """
        dims = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        mesh = self.mesh_library.get((*dims, is_expert_parallel))
        if mesh is None:
            hint = " tp_dim is None: pass tp_dim (a dimension of size 1 will do)." if self.tp_dim is None else ""
            known = sorted({key[:-1] for key in self.mesh_library if key[-1] == is_expert_parallel})
            raise ValueError(f"no sub-mesh of dimensions {dims}; known are {known}.{hint}")
        return mesh

    def get_dp_group(self, is_expert_parallel: bool = False) -> dist.ProcessGroup:
        """All data-parallel ranks: (outer, shard) under hybrid sharding, else the shard dimension."""
        if self.use_hybrid_fsdp:
            group = self.hybrid_fsdp_expt_group if is_expert_parallel else self.hybrid_fsdp_group
        else:
            group = self.get_fsdp_group(is_expert_parallel)
        return cast(dist.ProcessGroup, group)  # None only for experts without a mesh, of which nobody asks

    def get_fsdp_group(
        self, is_expert_parallel: bool = False, independent_all_gather: bool = False
    ) -> dist.ProcessGroup | None:
        """The ranks of the shard dimension; `independent_all_gather` for the communicator given for gathers, if any."""
        if is_expert_parallel:
            return (independent_all_gather and self.expt_fsdp_group_ag) or self.expt_fsdp_group
        return (independent_all_gather and self.fsdp_group_ag) or self.fsdp_group

    def get_outer_fsdp_group(self, is_expert_parallel: bool = False) -> dist.ProcessGroup | None:
        """The ranks of the outer dimension; None without hybrid sharding."""
        return self.expt_outer_fsdp_group if is_expert_parallel else self.outer_fsdp_group

    def get_root_mesh(self, is_expert_parallel: bool = False) -> DeviceMesh | None:
        """The mesh that was given for these parameters."""
        return self.expt_device_mesh if is_expert_parallel else self.device_mesh

    def get_logical_hybrid_fsdp_rank(self, is_expert_parallel: bool = False) -> int:
        """This rank's number in the global order of shards, which is inner-major.

        Raises:
            RuntimeError: the outer axis does not shard.
        """
        if not self.hsdp_outer_dp_shard:
            raise RuntimeError("there is one logical rank order only when outer_dp_sharding_strategy is 'optim'.")
        outer, inner = self.axes(is_expert_parallel)
        return inner.rank * outer.size + outer.rank

    @property
    def holds_first_experts(self) -> bool:
        """True on the first of the ranks that hold different experts under the same names."""
        return self.expt_device_mesh is None or _ranks(self.get_dp_group())[0] in _ranks(self.get_dp_group(True))

    def axes(self, is_expert: bool = False) -> tuple[Axis, Axis]:
        """The (outer, inner) axes of dense or expert parameters."""
        inner = Axis.of(self.get_fsdp_group(is_expert), self.get_fsdp_group(is_expert, independent_all_gather=True))
        return Axis.of(self.get_outer_fsdp_group(is_expert)), inner

    def dp_mesh(self, is_expert: bool = False) -> DeviceMesh:
        """The mesh of the data-parallel axes, outer first."""
        dims = (self.dp_outer_dim, self.dp_shard_dim) if self.use_hybrid_fsdp else (self.dp_shard_dim,)
        return self.get_submesh(dims, is_expert)

    def communicators(self) -> list[dist.ProcessGroup]:
        """Every group over which weights are gathered or gradients reduced, once, in the same order on all ranks."""
        axes = [axis for is_expert in (False, True) for axis in reversed(self.axes(is_expert))]
        groups = [group for axis in axes for group in (axis.group, axis.gather_group) if group is not None]
        return list({id(group): group for group in groups}.values())


#: By `is_expert`, the argument that is meant.
_MESH_NAMES = {False: "device_mesh", True: "expt_device_mesh"}


def _ranks(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


def _group(mesh: DeviceMesh | None, dim: str | None) -> dist.ProcessGroup | None:
    return None if mesh is None or dim is None else mesh[dim].get_group()


def _check_ascending(mesh: DeviceMesh, mesh_name: str, dims: Sequence[str]) -> None:
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


def _warn_of_unnamed(mesh: DeviceMesh, dims: Sequence[str]) -> None:
    """Logs a warning, on the mesh's first rank, about dimensions of several ranks outside all of `dims`."""
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


def _rows_along(mesh: DeviceMesh, dim: str) -> tuple[torch.Tensor, list[int]]:
    """Every rank's row along a dimension, shape (rows, ranks of a row), and the table dimensions that it covers.

    A flattened dimension is in no mesh's table, but this rank's row of it is: the coordinates of that row's ranks say
    how every row runs through the table.
    """
    table, own = mesh.mesh, mesh[dim].mesh.flatten()
    found = [(table == rank).nonzero() for rank in own]
    if any(len(coordinates) != 1 for coordinates in found):
        return own.unsqueeze(0), []  # flattened over dimensions that this sub-mesh does not have
    coordinates = torch.cat(found)
    covered = [position for position in range(table.dim()) if coordinates[:, position].unique().numel() > 1]
    rows = table.movedim(covered, list(range(len(covered))))[tuple(coordinates[:, covered].t())]
    return rows.reshape(len(own), -1).t(), covered
