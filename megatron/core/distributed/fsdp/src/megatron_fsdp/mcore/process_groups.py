"""megatron-core's process groups as the engine's `FSDPDistributedIndex`."""

import dataclasses

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp.machine.device import default_device_type
from megatron_fsdp.machine.mesh import FSDPDistributedIndex

DP_DIM = "dp_cp"
TP_DIM = "tp"

_FROM_PARALLEL_STATE = ["tp", "pp", "ep", "expt_tp", "dp", "dp_cp"]


@dataclasses.dataclass(frozen=True)
class AllGatherGroups:
    """Communicators for weights alone, so that their gathers never queue behind gradient reductions."""

    dp_cp_ag: dist.ProcessGroup
    """The same ranks as `dp_cp`."""


def build_dist_index(
    pg_collection: ProcessGroupCollection | None = None,
    *,
    device_type: str | None = None,
    num_distributed_optimizer_instances: int = 1,
) -> FSDPDistributedIndex:
    """The data-parallel axis (data times context parallelism), with a trivial tensor-parallel axis.

    Args:
        pg_collection: groups to use; None takes megatron-core's global ones, which must be initialized. If it has an
            attribute `dp_cp_ag` (see `create_all_gather_groups`), weights are gathered on that group.
        device_type: "cuda" or "cpu"; None takes what this machine has.
        num_distributed_optimizer_instances: as in the configuration.

    Raises:
        NotImplementedError: the groups describe a parallelism that the engine does not combine with yet.
        ValueError: there is no data-parallel group.
    """
    groups = _groups_of(pg_collection)
    _refuse_other_parallelism(groups, num_distributed_optimizer_instances)
    dp_group = _dp_cp_group(groups)
    tp_group = getattr(groups, "tp", None) or _group_of_one()
    ranks = torch.tensor(dist.get_process_group_ranks(dp_group), dtype=torch.int)
    mesh = DeviceMesh.from_group(
        [dp_group, tp_group],
        device_type or default_device_type(),
        mesh=ranks.view(-1, 1),
        mesh_dim_names=(DP_DIM, TP_DIM),
    )
    return FSDPDistributedIndex(
        mesh, dp_shard_dim=DP_DIM, tp_dim=TP_DIM, fsdp_group_ag=getattr(groups, "dp_cp_ag", None)
    )


def create_all_gather_groups(pg_collection: ProcessGroupCollection | None = None) -> AllGatherGroups:
    """New communicators over the ranks of the data-parallel groups. **Collective** over the data-parallel group.

    Set the result on the collection that the model is built with: `pg_collection.dp_cp_ag = groups.dp_cp_ag`.
    """
    ranks = dist.get_process_group_ranks(_dp_cp_group(_groups_of(pg_collection)))
    # Only these ranks take part, so that other data-parallel groups need not be named in the same order here.
    return AllGatherGroups(dp_cp_ag=dist.new_group(ranks, use_local_synchronization=True, group_desc="DP_CP_AG_GROUP"))


def _groups_of(pg_collection: ProcessGroupCollection | None) -> ProcessGroupCollection:
    if pg_collection is not None:
        return pg_collection
    if not parallel_state.model_parallel_is_initialized():
        raise ValueError(
            "no pg_collection was given and megatron-core has no process groups; "
            "call megatron.core.parallel_state.initialize_model_parallel() or pass pg_collection"
        )
    return ProcessGroupCollection.use_mpu_process_groups(required_pgs=_FROM_PARALLEL_STATE)


def _dp_cp_group(groups: ProcessGroupCollection) -> dist.ProcessGroup:
    """The group over data and context parallelism; without context parallelism `dp` alone will do."""
    dp_cp = getattr(groups, "dp_cp", None)
    if dp_cp is not None:
        return dp_cp
    if getattr(groups, "dp", None) is None or _size(groups, "cp") > 1:
        raise ValueError("pg_collection has no data-parallel group; set dp_cp (or dp, without context parallelism)")
    return groups.dp


def _refuse_other_parallelism(groups: ProcessGroupCollection, num_distributed_optimizer_instances: int) -> None:
    """The one place that says which parallelism the engine is not combined with yet."""
    reasons = {
        "tp": "tensor-parallel shards are not described in its DTensors",
        "expt_tp": "tensor-parallel shards are not described in its DTensors",
        "pp": "a checkpoint would confuse the layers of different stages",
        "ep": "experts have no data-parallel mesh of their own",
    }
    for name, reason in reasons.items():
        if _size(groups, name) > 1:
            raise NotImplementedError(
                f"process group {name!r} has {_size(groups, name)} ranks; Megatron-FSDP supports data parallelism "
                f"only: {reason}. Initialize megatron-core with this size at 1."
            )
    if num_distributed_optimizer_instances > 1:
        raise NotImplementedError(
            f"num_distributed_optimizer_instances={num_distributed_optimizer_instances}: "
            "a second, outer data-parallel axis is not built from megatron-core's groups yet; leave it at 1."
        )


def _size(groups: ProcessGroupCollection, name: str) -> int:
    group = getattr(groups, name, None)
    return 1 if group is None else group.size()


def _group_of_one() -> dist.ProcessGroup:
    """A group of this rank alone."""
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)
