"""megatron-core's process groups as the engine's `FSDPDistributedIndex`."""

import dataclasses

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp.config import shards_anything
from megatron_fsdp.dtensor.shard_spec import tensor_parallel_group
from megatron_fsdp.machine.device import default_device_type
from megatron_fsdp.machine.mesh import FSDPDistributedIndex
from megatron_fsdp.machine.torch_compat import memberships

DP_DIM = "dp_cp"
OUTER_DIM = "outer_fsdp_dp"
TP_DIM = "tp"

_FROM_PARALLEL_STATE = ["tp", "pp", "ep", "expt_tp", "dp", "dp_cp", "expt_dp"]
#: Further ones when there are several instances of the distributed optimizer.
_OF_INSTANCES = ["intra_dp_cp", "intra_expt_dp", "inter_dist_opt"]


@dataclasses.dataclass(frozen=True)
class AllGatherGroups:
    """Communicators for weights alone, so that their gathers never queue behind gradient reductions."""

    dp_cp_ag: dist.ProcessGroup
    """The same ranks as `dp_cp`, or as `intra_dp_cp` with several instances of the distributed optimizer."""
    expt_dp_ag: dist.ProcessGroup | None = None
    """The same for experts that are spread over ranks: as `expt_dp` or `intra_expt_dp`."""


def build_dist_index(
    pg_collection: ProcessGroupCollection | None = None,
    *,
    device_type: str | None = None,
    num_distributed_optimizer_instances: int = 1,
    outer_dp_sharding_strategy: str | int = 0,
) -> FSDPDistributedIndex:
    """The data-parallel axes (data times context parallelism), and the tensor-parallel one.

    With several instances of the distributed optimizer the ranks inside an instance are the inner axis, the instances
    the outer one. With expert parallelism experts have a mesh of their own.

    Args:
        pg_collection: groups to use; None takes megatron-core's global ones, which must be initialized. If it has
            attributes `dp_cp_ag` and `expt_dp_ag` (see `create_all_gather_groups`), weights are gathered on those.
        device_type: "cuda" or "cpu"; None takes what this machine has.
        num_distributed_optimizer_instances: as in the configuration. Their groups are made here if the collection
            (or megatron-core's state) does not have them, which is **collective** over the data-parallel group.
        outer_dp_sharding_strategy: as in the configuration.

    Raises:
        NotImplementedError: the groups describe a parallelism that the engine does not combine with yet.
        ValueError: a group that is needed is missing, or groups and numbers contradict each other.
    """
    instances = num_distributed_optimizer_instances
    groups = _groups_of(pg_collection)
    _refuse_other_parallelism(groups)
    outer_shards = shards_anything(outer_dp_sharding_strategy, "outer_dp_sharding_strategy")
    if outer_shards and instances == 1:
        raise ValueError(
            f"outer_dp_sharding_strategy={outer_dp_sharding_strategy!r} shards over the instances of the distributed "
            "optimizer, but there is 1; set num_distributed_optimizer_instances"
        )
    whole = _whole_groups(groups, instances)
    device_type = device_type or default_device_type()
    alone = [dist.get_rank()]
    tp_group = getattr(groups, "tp", None) or dist.new_group(alone, use_local_synchronization=True)
    dense, *spread = [_DataParallelGroups.divided(groups, group, name, instances) for name, group in whole.items()]
    experts = spread[0] if spread else None
    is_hybrid = instances > 1
    return FSDPDistributedIndex(
        dense.mesh(tp_group, device_type),
        dp_shard_dim=DP_DIM,
        dp_outer_dim=OUTER_DIM if is_hybrid else None,
        tp_dim=TP_DIM,
        hybrid_fsdp_group=dense.all_ranks if is_hybrid else None,
        hybrid_fsdp_expt_group=experts.all_ranks if is_hybrid and experts else None,
        hsdp_outer_dp_shard=outer_shards,
        expt_device_mesh=experts.mesh(tp_group, device_type) if experts else None,
        fsdp_group_ag=getattr(groups, "dp_cp_ag", None),
        expt_fsdp_group_ag=getattr(groups, "expt_dp_ag", None) if experts else None,
    )


def beside_tensor_parallel_ranks(ranks: torch.Tensor, tp_group: dist.ProcessGroup) -> torch.Tensor:
    """Data-parallel `ranks`, this one's among them, with a last dim for the tensor-parallel ranks of each.

    megatron-core's groups are the axes of one grid, so neighbours along one axis are everywhere as far apart.
    """
    offsets = torch.tensor(dist.get_process_group_ranks(tp_group), dtype=ranks.dtype) - dist.get_rank()
    return ranks.unsqueeze(-1) + offsets


def grad_stats_group(index: FSDPDistributedIndex) -> dist.ProcessGroup:
    """All ranks that hold distinct gradient shards. **Collective** over them, with tensor parallelism."""
    dp_group, tp_group = index.get_dp_group(), tensor_parallel_group(index)
    if tp_group is None:
        return dp_group
    if dp_group.size() * tp_group.size() == dist.get_world_size():
        assert dist.group.WORLD is not None, "torch.distributed is initialised"
        return dist.group.WORLD
    data = torch.tensor(dist.get_process_group_ranks(dp_group))
    ranks = beside_tensor_parallel_ranks(data, tp_group).flatten().sort().values.tolist()
    return dist.new_group(ranks, use_local_synchronization=True)


def create_all_gather_groups(
    pg_collection: ProcessGroupCollection | None = None, *, num_distributed_optimizer_instances: int = 1
) -> AllGatherGroups:
    """New communicators over the ranks of the data-parallel groups. **Collective** over the data-parallel group.

    Set the result on the collection that the model is built with: `pg_collection.dp_cp_ag = groups.dp_cp_ag`.
    """
    groups = _groups_of(pg_collection)
    made = {}
    for name, group in _whole_groups(groups, num_distributed_optimizer_instances).items():
        row, _ = _row_and_column(group, num_distributed_optimizer_instances)
        made[f"{name}_ag"] = _new_group(row, group, f"{name}_ag".upper())
    return AllGatherGroups(**made)


def with_all_gather_groups(
    pg_collection: ProcessGroupCollection | None = None, *, num_distributed_optimizer_instances: int = 1
) -> ProcessGroupCollection:
    """`pg_collection`, or a new one of megatron-core's groups, on which `create_all_gather_groups` are set.

    **Collective** over the data-parallel group.
    """
    groups = _groups_of(pg_collection)
    made = create_all_gather_groups(groups, num_distributed_optimizer_instances=num_distributed_optimizer_instances)
    groups.dp_cp_ag, groups.expt_dp_ag = made.dp_cp_ag, made.expt_dp_ag
    return groups


@dataclasses.dataclass(frozen=True)
class _DataParallelGroups:
    """This rank's data-parallel groups, of dense parameters or of experts."""

    all_ranks: dist.ProcessGroup
    inner: dist.ProcessGroup
    """All ranks, or those of one instance of the distributed optimizer."""
    outer: dist.ProcessGroup | None
    """The same place in every instance; None if there is one instance."""

    @classmethod
    def divided(
        cls, groups: ProcessGroupCollection, everyone: dist.ProcessGroup, name: str, instances: int
    ) -> "_DataParallelGroups":
        """**Collective** over `everyone` if there are several instances and the collection does not have their groups.

        Raises:
            ValueError: it has others.
        """
        if instances == 1:
            return cls(everyone, everyone, None)
        inner, outer = (getattr(groups, part, None) for part in (f"intra_{name}", "inter_dist_opt"))
        if inner is None or outer is None:
            # megatron-core makes them only if it is told to, and only where einops is installed.
            return cls(everyone, *(_new_group(ranks, everyone) for ranks in _row_and_column(everyone, instances)))
        wanted, came = _row_and_column(everyone, instances), tuple(map(dist.get_process_group_ranks, (inner, outer)))
        if came != wanted:
            raise ValueError(
                f"the groups intra_{name} and inter_dist_opt have ranks {came[0]} and {came[1]}; "
                f"num_distributed_optimizer_instances={instances} divides {name} into {wanted[0]} and {wanted[1]}"
            )
        return cls(everyone, inner, outer)

    def mesh(self, tp_group: dist.ProcessGroup, device_type: str) -> DeviceMesh:
        """(data parallel, tensor parallel), with an outer dimension first if there are several instances."""
        ranks = torch.tensor(dist.get_process_group_ranks(self.all_ranks), dtype=torch.int)
        if self.outer is None:
            names = (DP_DIM, TP_DIM)
            table = beside_tensor_parallel_ranks(ranks, tp_group)
            return DeviceMesh.from_group([self.inner, tp_group], device_type, mesh=table, mesh_dim_names=names)
        table = beside_tensor_parallel_ranks(ranks.view(self.outer.size(), self.inner.size()), tp_group)
        return DeviceMesh.from_group(
            [self.outer, self.inner, tp_group],
            device_type,
            mesh=table,
            mesh_dim_names=(OUTER_DIM, DP_DIM, TP_DIM),
        )


def _row_and_column(group: dist.ProcessGroup, instances: int) -> tuple[list[int], list[int]]:
    """Ranks of this rank's instance, and of its place in all instances; megatron-core numbers one after the other."""
    table = torch.tensor(dist.get_process_group_ranks(group)).view(instances, -1)
    row, column = (table == dist.get_rank()).nonzero()[0].tolist()
    return table[row].tolist(), table[:, column].tolist()


def _whole_groups(groups: ProcessGroupCollection, instances: int) -> dict[str, dist.ProcessGroup]:
    """By name: all data-parallel ranks, and those of the same experts if these are spread.

    Raises:
        ValueError: one is missing, or `instances` does not divide it.
    """
    found = {"dp_cp": _dp_cp_group(groups)}
    if _size(groups, "ep") > 1:
        if getattr(groups, "expt_dp", None) is None:
            raise ValueError(f"pg_collection has ep, of {_size(groups, 'ep')} ranks, but no expt_dp; set it")
        found["expt_dp"] = groups.expt_dp
    for name, group in found.items():
        if instances < 1 or group.size() % instances:
            raise ValueError(
                f"num_distributed_optimizer_instances={instances} does not divide the {group.size()} ranks of {name}"
            )
    return found


def _groups_of(pg_collection: ProcessGroupCollection | None) -> ProcessGroupCollection:
    if pg_collection is not None:
        return pg_collection
    if not parallel_state.model_parallel_is_initialized():
        raise ValueError(
            "no pg_collection was given and megatron-core has no process groups; "
            "call megatron.core.parallel_state.initialize_model_parallel() or pass pg_collection"
        )
    has_instances = parallel_state.get_inter_distributed_optimizer_instance_group(check_initialized=False) is not None
    return ProcessGroupCollection.use_mpu_process_groups(
        required_pgs=[*_FROM_PARALLEL_STATE, *(_OF_INSTANCES if has_instances else ())]
    )


def _dp_cp_group(groups: ProcessGroupCollection) -> dist.ProcessGroup:
    """The group over data and context parallelism; without context parallelism `dp` alone will do."""
    dp_cp = getattr(groups, "dp_cp", None)
    if dp_cp is not None:
        return dp_cp
    if getattr(groups, "dp", None) is None or _size(groups, "cp") > 1:
        raise ValueError("pg_collection has no data-parallel group; set dp_cp (or dp, without context parallelism)")
    return groups.dp


def _refuse_other_parallelism(groups: ProcessGroupCollection) -> None:
    """Refuses, and is alone to refuse, parallelism that the engine is not combined with."""
    experts, dense = _size(groups, "expt_tp"), _size(groups, "tp")
    if getattr(groups, "expt_tp", None) is not None and experts != dense:
        raise NotImplementedError(
            f"process group 'expt_tp' has {experts} ranks and 'tp' {dense}; experts need the tensor-parallel ranks of "
            "the rest of the model. Leave expert_tensor_parallel_size out."
        )
    if _size(groups, "pp") > 1:
        raise NotImplementedError(
            f"process group 'pp' has {_size(groups, 'pp')} ranks; Megatron-FSDP supports data, tensor and expert "
            "parallelism only: a checkpoint would confuse the layers of different stages. Initialize megatron-core "
            "with this size at 1."
        )


def _size(groups: ProcessGroupCollection, name: str) -> int:
    group = getattr(groups, name, None)
    return 1 if group is None else group.size()


def _new_group(ranks: list[int], within: dist.ProcessGroup, name: str | None = None) -> dist.ProcessGroup:
    """A group of `ranks`, which are some of the ranks of `within`. **Collective** over these.

    Raises:
        RuntimeError: torch would name the group differently on different ranks, which then waited for each other.
    """
    if len(ranks) == dist.get_world_size():
        return dist.new_group(ranks, group_desc=name)
    # Otherwise only these ranks take part, so that other data-parallel groups need not be named in the same order here.
    counts: list[int] = [0] * within.size()
    dist.all_gather_object(counts, memberships(), group=within)
    if len(set(counts)) > 1:
        found = ", ".join(
            f"rank {rank}: {n}" for rank, n in zip(dist.get_process_group_ranks(within), counts, strict=True)
        )
        raise RuntimeError(
            "a group of some data-parallel ranks can only be made while all of them are in equally many groups, "
            f"by whose number torch names it; found {found}. Make groups of your own on all of these ranks alike, or "
            "after the model is built; or give the groups of instances and gathers in pg_collection."
        )
    return dist.new_group(ranks, use_local_synchronization=True, group_desc=name)
