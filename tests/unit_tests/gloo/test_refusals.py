"""Combinations that the engine refuses for now say so on every rank, before anything is communicated."""

from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp import fully_shard_model
from tests.unit_tests.harness.rank_pool import RankPool


def shard_over_tensor_parallel_ranks() -> None:
    """A mesh whose tp dimension has two ranks."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    fully_shard_model(nn.Linear(4, 4), device_mesh=mesh, dp_shard_dim="dp", tp_dim="tp")


def test_tensor_parallel_ranks_are_refused(ranks2: RankPool) -> None:
    ranks2.run_expecting(NotImplementedError, "tp_dim='tp' has 2 ranks", shard_over_tensor_parallel_ranks)
