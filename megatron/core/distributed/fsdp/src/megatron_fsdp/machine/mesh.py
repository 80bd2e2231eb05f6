"""`FSDPDistributedIndex`: axis names to process groups, for dense and expert parameters."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp.machine.collectives import Axis
from megatron_fsdp.machine.mesh_grid import check_ascending, warn_of_unnamed


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

    def __init__(
        self,
        device_mesh: DeviceMesh,
        dp_shard_dim: str | None = None,
        dp_outer_dim: str | None = None,
        tp_dim: str | None = None,
        hybrid_fsdp_group: dist.ProcessGroup | None = None,
        hybrid_fsdp_expt_group: dist.ProcessGroup | None = None,
        hsdp_outer_dp_shard: bool = False,
        expt_device_mesh: DeviceMesh | None = None,
        fsdp_group_ag: dist.ProcessGroup | None = None,
        expt_fsdp_group_ag: dist.ProcessGroup | None = None,
    ):
        self.device_mesh = device_mesh
        self.dp_shard_dim = dp_shard_dim
        self.dp_outer_dim = dp_outer_dim
        self.tp_dim = tp_dim
        self.hybrid_fsdp_group = hybrid_fsdp_group
        self.hybrid_fsdp_expt_group = hybrid_fsdp_expt_group
        self.use_hybrid_fsdp = dp_outer_dim is not None
        self.hsdp_outer_dp_shard = hsdp_outer_dp_shard
        self.expt_device_mesh = expt_device_mesh
        self.fsdp_group_ag = fsdp_group_ag
        self.expt_fsdp_group_ag = expt_fsdp_group_ag
        self._check_names()
        self._check_grids()
        self.mesh_library = self._register_submeshes()
        self.fsdp_group = device_mesh[dp_shard_dim].get_group()
        self.outer_fsdp_group = device_mesh[dp_outer_dim].get_group() if self.use_hybrid_fsdp else None
        self.expt_fsdp_group = expt_device_mesh[dp_shard_dim].get_group() if expt_device_mesh is not None else None
        has_expert_outer = expt_device_mesh is not None and self.use_hybrid_fsdp
        self.expt_outer_fsdp_group = expt_device_mesh[dp_outer_dim].get_group() if has_expert_outer else None
        self._check_groups()

    def __deepcopy__(self, memo: dict) -> FSDPDistributedIndex:
        return self  # process groups cannot be copied; parameters carry this object, and can

    def _check_names(self) -> None:
        if self.dp_shard_dim is None:
            raise ValueError("dp_shard_dim is None; name the dimension of device_mesh over which to shard parameters.")
        for mesh_name, mesh in (("device_mesh", self.device_mesh), ("expt_device_mesh", self.expt_device_mesh)):
            if mesh is not None and mesh.get_coordinate() is None:
                raise ValueError(
                    f"rank {dist.get_rank()} is not in {mesh_name}, which has ranks {mesh.mesh.flatten().tolist()}; "
                    "only ranks that share the model build it."
                )
        if (self.dp_outer_dim is None) != (self.hybrid_fsdp_group is None):
            names = ("dp_outer_dim", "hybrid_fsdp_group")
            given, missing = names if self.dp_outer_dim is not None else reversed(names)
            raise ValueError(f"{given} is given without {missing}; hybrid sharding needs both, plain sharding neither.")
        missing = [name for name in ("dp_outer_dim", "expt_device_mesh") if getattr(self, name) is None]
        if self.hybrid_fsdp_expt_group is not None and missing:
            raise ValueError(
                f"hybrid_fsdp_expt_group is given without {' and '.join(missing)}; it is all the ranks of outer x "
                "shard of the expert mesh, so pass all three or leave it out."
            )
        options = [option for option in ("dp_shard_dim", "dp_outer_dim", "tp_dim") if getattr(self, option) is not None]
        for position, option in enumerate(options):
            dim = getattr(self, option)
            twins = [other for other in options[position + 1 :] if getattr(self, other) == dim]
            if twins:
                raise ValueError(f"{option} and {twins[0]} are both {dim!r}; every axis needs a dimension of its own.")
            for mesh_name, mesh in (("device_mesh", self.device_mesh), ("expt_device_mesh", self.expt_device_mesh)):
                if mesh is not None and not _has_dim(mesh, dim):
                    raise ValueError(
                        f"{option}={dim!r} is not a dimension of {mesh_name}, which has {mesh.mesh_dim_names}; "
                        "name the dimensions when the mesh is made, or flatten the ones you mean first."
                    )

    def _check_grids(self) -> None:
        dims = [dim for dim in (self.dp_outer_dim, self.dp_shard_dim, self.tp_dim) if dim is not None]
        check_ascending(self.device_mesh, "device_mesh", dims)
        if self.expt_device_mesh is not None:
            check_ascending(self.expt_device_mesh, "expt_device_mesh", dims)
        warn_of_unnamed(self.device_mesh, dims)

    def _check_groups(self) -> None:
        for is_expert, mesh in ((False, self.device_mesh), (True, self.expt_device_mesh)):
            if mesh is not None and self.use_hybrid_fsdp:
                self._check_hybrid(is_expert)
        for option, group, gather in (
            ("fsdp_group_ag", self.fsdp_group, self.fsdp_group_ag),
            ("expt_fsdp_group_ag", self.expt_fsdp_group, self.expt_fsdp_group_ag),
        ):
            if gather is None:
                continue
            if group is None or dist.get_process_group_ranks(gather) != dist.get_process_group_ranks(group):
                raise ValueError(f"{option} must hold the same ranks, in the same order, as the shard dimension's.")
        if self.expt_device_mesh is not None and not self._has_tensor_parallelism():
            self._check_experts()

    def _has_tensor_parallelism(self) -> bool:
        return self.tp_dim is not None and self.get_submesh(self.tp_dim).size() > 1

    def _check_experts(self) -> None:
        """Experts are spread over some of the ranks that average dense gradients, which all see the experts' tokens."""
        dense, experts = (dist.get_process_group_ranks(self.get_dp_group(is_expert)) for is_expert in (False, True))
        strangers = sorted(set(experts) - set(dense))
        if strangers or len(dense) % len(experts):
            raise ValueError(
                f"expt_device_mesh spreads this rank's experts over ranks {experts}, of which device_mesh's data-"
                f"parallel ranks {dense} must be a multiple: data-parallel size = expert-parallel size x expert "
                "data-parallel size."
            )

    def _check_hybrid(self, is_expert: bool) -> None:
        """One mesh's group of all (outer, shard) ranks, and that torch can slice the two dimensions together."""
        mesh_name = "expt_device_mesh" if is_expert else "device_mesh"
        option = "hybrid_fsdp_expt_group" if is_expert else "hybrid_fsdp_group"
        group = getattr(self, option)
        if group is None:
            raise ValueError(f"{mesh_name} and dp_outer_dim need {option}: all its ranks of outer x shard.")
        expected = self.get_fsdp_group(is_expert).size() * self.get_outer_fsdp_group(is_expert).size()
        if group.size() != expected:
            raise ValueError(
                f"{option} has {group.size()} ranks; expected {expected}: all ranks of {self.dp_outer_dim!r} x "
                f"{self.dp_shard_dim!r} of {mesh_name}."
            )
        mesh = self.mesh_library.get((self.dp_outer_dim, self.dp_shard_dim, is_expert))
        if mesh is None:
            raise ValueError(
                f"{mesh_name} with dimensions {self.get_root_mesh(is_expert).mesh_dim_names} has no sub-mesh of "
                f"({self.dp_outer_dim!r}, {self.dp_shard_dim!r}); the outer dimension must come first, and not overlap."
            )
        own, wanted = sorted(dist.get_process_group_ranks(group)), sorted(mesh.mesh.flatten().tolist())
        if own != wanted:
            raise ValueError(
                f"{option} has ranks {own}; expected {wanted}: all ranks of {self.dp_outer_dim!r} x "
                f"{self.dp_shard_dim!r} of {mesh_name}."
            )

    def _register_submeshes(self) -> dict[tuple[str | bool, ...], DeviceMesh]:
        outer, shard, tp = self.dp_outer_dim, self.dp_shard_dim, self.tp_dim
        combinations = [(tp,), (outer, shard, tp), (shard, tp), (outer, shard), (shard,)]
        library: dict[tuple[str | bool, ...], DeviceMesh] = {}
        for is_expert, mesh in ((False, self.device_mesh), (True, self.expt_device_mesh)):
            for dims in combinations:
                submesh = _submesh(mesh, dims) if mesh is not None and None not in dims else None
                if submesh is not None:
                    library[(*dims, is_expert)] = submesh
        return library

    def get_submesh(self, mesh_dim_names: str | tuple[str, ...], is_expert_parallel: bool = False) -> DeviceMesh:
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
        if not self.use_hybrid_fsdp:
            return self.get_fsdp_group(is_expert_parallel)
        return self.hybrid_fsdp_expt_group if is_expert_parallel else self.hybrid_fsdp_group

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

    def get_root_mesh(self, is_expert_parallel: bool = False) -> DeviceMesh:
        """The mesh that was given for these parameters."""
        return self.expt_device_mesh if is_expert_parallel else self.device_mesh

    def get_logical_hybrid_fsdp_rank(self, is_expert_parallel: bool = False) -> int:
        """This rank's number in the global order of shards, which is inner-major.

        Raises:
            RuntimeError: the outer axis does not shard.
        """
        if not self.hsdp_outer_dp_shard:
            raise RuntimeError("there is one logical rank order only when outer_dp_sharding_strategy is 'optim'.")
        outer = self.get_outer_fsdp_group(is_expert_parallel)
        return self.get_fsdp_group(is_expert_parallel).rank() * outer.size() + outer.rank()

    @property
    def expert_parallel_size(self) -> int:
        """Over how many ranks the experts of a layer are distributed; their data-parallel ranks are that many fewer."""
        if self.expt_device_mesh is None:
            return 1
        return max(1, self.get_dp_group().size() // self.get_dp_group(is_expert_parallel=True).size())

    @property
    def holds_first_experts(self) -> bool:
        """Among the ranks that hold different experts under the same names, this is the first."""
        if self.expert_parallel_size == 1:
            return True
        first = dist.get_process_group_ranks(self.get_dp_group())[0]
        return first in dist.get_process_group_ranks(self.get_dp_group(is_expert_parallel=True))

    def axes(self, is_expert: bool = False) -> tuple[Axis, Axis]:
        """The (outer, inner) axes of dense or expert parameters."""
        inner = Axis.of(self.get_fsdp_group(is_expert), self.get_fsdp_group(is_expert, independent_all_gather=True))
        return Axis.of(self.get_outer_fsdp_group(is_expert)), inner

    def dp_mesh(self, is_expert: bool = False) -> DeviceMesh:
        """The mesh of the data-parallel axes, outer first."""
        dims = (self.dp_outer_dim, self.dp_shard_dim) if self.use_hybrid_fsdp else (self.dp_shard_dim,)
        return self.get_submesh(dims, is_expert)


def _has_dim(mesh: DeviceMesh, dim: str) -> bool:
    try:
        mesh[dim]
    except KeyError:  # dimensions made by `_flatten` are found by indexing only
        return False
    return True


def _submesh(mesh: DeviceMesh, dims: tuple[str, ...]) -> DeviceMesh | None:
    try:
        return mesh[dims[0]] if len(dims) == 1 else mesh[dims]
    except (KeyError, RuntimeError):  # torch slices dimensions in the mesh's own order only
        return None
