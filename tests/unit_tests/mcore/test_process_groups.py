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


def with_tp() -> None:
    build_with_sizes(tensor_model_parallel_size=2)


def with_pp() -> None:
    build_with_sizes(pipeline_model_parallel_size=2)


def with_ep() -> None:
    build_with_sizes(expert_model_parallel_size=2, expert_tensor_parallel_size=1)


@pytest.mark.parametrize(("job", "name"), [(with_tp, "tp"), (with_pp, "pp"), (with_ep, "ep")])
def test_other_parallelism_is_refused(mcore_ranks2: RankPool, job, name: str) -> None:
    mcore_ranks2.run_expecting(NotImplementedError, f"process group '{name}' has 2 ranks.*data parallelism only", job)


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
