"""megatron-core's groups become the engine's axes; parallelism that is not combined yet is refused by name."""

import pytest
import torch.distributed as dist

from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.mcore.models import initialize_groups


def index_facts(source: str) -> dict:
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_fsdp.mcore import build_dist_index, create_all_gather_groups

    initialize_groups()
    dp_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    groups = None
    if source != "global":
        groups = ProcessGroupCollection(dp=dp_group) if source == "dp only" else ProcessGroupCollection(dp_cp=dp_group)
    if source == "all-gather":
        groups.dp_cp_ag = create_all_gather_groups(groups).dp_cp_ag
    index = build_dist_index(groups)
    gather_group = index.get_fsdp_group(independent_all_gather=True)
    return {
        "is_same_group": index.get_dp_group() is dp_group,
        "has_own_gather_group": gather_group is not dp_group and dist.get_process_group_ranks(gather_group) == [0, 1],
        "names": index.device_mesh.mesh_dim_names,
        "shape": tuple(index.device_mesh.shape),
        "tp": index.get_submesh("tp").size(),
    }


@pytest.mark.parametrize("source", ["global", "collection", "dp only", "all-gather"])
def test_groups_become_the_index(mcore_ranks2: RankPool, source: str) -> None:
    expected = {
        "is_same_group": True,
        "has_own_gather_group": source == "all-gather",
        "names": ("dp_cp", "tp"),
        "shape": (2, 1),
        "tp": 1,
    }
    assert mcore_ranks2.run(index_facts, source) == [expected] * 2


def build_with_sizes(**sizes: int) -> None:
    from megatron.core import parallel_state

    from megatron_fsdp.mcore import build_dist_index

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **sizes)
    build_dist_index()


def with_other_tp_of_experts() -> None:
    build_with_sizes(tensor_model_parallel_size=2, expert_tensor_parallel_size=1)


def with_pp() -> None:
    build_with_sizes(pipeline_model_parallel_size=2)


@pytest.mark.parametrize(("job", "name"), [(with_pp, "pp")])
def test_other_parallelism_is_refused(mcore_ranks2: RankPool, job, name: str) -> None:
    mcore_ranks2.run_expecting(NotImplementedError, f"process group '{name}' has 2 ranks.*data, tensor and expert", job)


def ranks_of(group) -> list[int] | None:
    return None if group is None else dist.get_process_group_ranks(group)


def index_of_instances(ep: int, is_given: bool, outer: str) -> dict:
    """Ranks of every group that the index knows, with two instances of the distributed optimizer."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_fsdp.mcore import build_dist_index, create_all_gather_groups

    initialize_groups(expert_model_parallel_size=ep)
    groups, rank = None, dist.get_rank()
    if is_given:
        groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["dp_cp", "ep", "expt_dp"])
        groups.intra_dp_cp, _ = dist.new_subgroups(2)
        groups.inter_dist_opt, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
        groups.intra_expt_dp = dist.new_subgroups(1)[0] if ep == 2 else groups.intra_dp_cp
        for name, group in vars(create_all_gather_groups(groups, num_distributed_optimizer_instances=2)).items():
            setattr(groups, name, group)
    index = build_dist_index(groups, num_distributed_optimizer_instances=2, outer_dp_sharding_strategy=outer)
    assert index.hybrid_fsdp_group is parallel_state.get_data_parallel_group(with_context_parallel=True)
    if is_given:
        assert index.fsdp_group is groups.intra_dp_cp and index.outer_fsdp_group is groups.inter_dist_opt
        assert index.axes()[1].gather_group is groups.dp_cp_ag is not groups.intra_dp_cp
    names = ["fsdp_group", "outer_fsdp_group", "hybrid_fsdp_group"]
    names += ["expt_fsdp_group", "expt_outer_fsdp_group", "hybrid_fsdp_expt_group"]
    found = {name: ranks_of(getattr(index, name)) for name in names}
    return found | {"shape": tuple(index.dp_mesh().shape), "rank": rank, "outer": index.hsdp_outer_dp_shard}


def beside_a_group_of_the_first_rank(instances: int) -> list[int] | str:
    """Ranks of the communicator for gathers, or why there is none, where one rank is in one group more."""
    from megatron_fsdp.mcore import create_all_gather_groups

    initialize_groups()
    mine = [dist.get_rank()]
    try:
        if mine == [0]:
            dist.new_group(mine, use_local_synchronization=True)
        groups = create_all_gather_groups(num_distributed_optimizer_instances=instances)
        return ranks_of(groups.dp_cp_ag)
    except RuntimeError as error:
        return str(error)
    finally:
        if mine != [0]:  # later tests want as many on all ranks
            dist.new_group(mine, use_local_synchronization=True)


def test_ranks_in_unequal_numbers_of_groups_do_not_wait_for_each_other(mcore_ranks4: RankPool) -> None:
    assert mcore_ranks4.run(beside_a_group_of_the_first_rank, 1) == [[0, 1, 2, 3]] * 4
    for said in mcore_ranks4.run(beside_a_group_of_the_first_rank, 2):
        assert "while all of them are in equally many groups" in said and "rank 0: " in said


@pytest.mark.parametrize(
    ("ep", "is_given", "outer"), [(1, False, "no_shard"), (2, False, "optim"), (1, True, "optim"), (2, True, 0)]
)
def test_instances_of_the_optimizer_become_the_outer_axis(
    mcore_ranks4: RankPool, ep: int, is_given: bool, outer: str
) -> None:
    for rank, found in enumerate(mcore_ranks4.run(index_of_instances, ep, is_given, outer)):
        first, place = rank - rank % 2, rank % 2
        dense = {"fsdp_group": [first, first + 1], "outer_fsdp_group": [place, place + 2]}
        experts = {"expt_fsdp_group": None, "expt_outer_fsdp_group": None, "hybrid_fsdp_expt_group": None}
        if ep == 2:
            peers = [place, place + 2]
            experts = {"expt_fsdp_group": [rank], "expt_outer_fsdp_group": peers, "hybrid_fsdp_expt_group": peers}
        more = {"hybrid_fsdp_group": [0, 1, 2, 3], "shape": (2, 2), "rank": rank, "outer": outer == "optim"}
        assert found == dense | experts | more


def build_wrong(what: str) -> None:
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_fsdp.mcore import build_dist_index

    initialize_groups()
    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["dp_cp"])
    options = {"num_distributed_optimizer_instances": 2}
    if what == "three":
        options = {"num_distributed_optimizer_instances": 3}
    elif what == "outer alone":
        options = {"outer_dp_sharding_strategy": "optim"}
    elif what == "swapped":
        groups.inter_dist_opt = _group_of_two()
        groups.intra_dp_cp = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        groups.intra_dp_cp, groups.inter_dist_opt = groups.inter_dist_opt, groups.intra_dp_cp
    elif what == "no expt_dp":
        groups.ep = groups.dp_cp
    build_dist_index(groups, **options)


def _group_of_two():
    return dist.new_group([0, 1])


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("three", "num_distributed_optimizer_instances=3 does not divide the 2 ranks of dp_cp"),
        ("outer alone", "shards over the instances of the distributed optimizer, but there is 1"),
        (
            "swapped",
            r"ranks \[0, 1\] and \[\d\]; num_distributed_optimizer_instances=2 divides dp_cp into \[\d\] and \[0, 1\]",
        ),
        ("no expt_dp", "has ep, of 2 ranks, but no expt_dp"),
    ],
)
def test_groups_that_contradict_each_other_are_named(mcore_ranks2: RankPool, what: str, match: str) -> None:
    mcore_ranks2.run_expecting(ValueError, match, build_wrong, what)


def test_experts_have_the_tensor_parallel_ranks_of_the_rest(mcore_ranks2: RankPool) -> None:
    match = "process group 'expt_tp' has 1 ranks and 'tp' 2"
    mcore_ranks2.run_expecting(NotImplementedError, match, with_other_tp_of_experts)


def without_groups(collection: bool) -> None:
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_fsdp.mcore import build_dist_index

    parallel_state.destroy_model_parallel()
    build_dist_index(ProcessGroupCollection() if collection else None)


@pytest.mark.parametrize(
    ("collection", "match"), [(False, "initialize_model_parallel"), (True, "no data-parallel group")]
)
def test_missing_groups_are_named(mcore_ranks2: RankPool, collection: bool, match: str) -> None:
    mcore_ranks2.run_expecting(ValueError, match, without_groups, collection)
