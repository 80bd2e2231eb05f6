"""Hybrid sharding: shards inside a host, replicates over hosts.

    torchrun --nproc-per-node 4 examples/hsdp.py

runs on 2 x 2 ranks as if they were two hosts. On real hosts `torchrun` runs on each of them, and the mesh is
(hosts, GPUs of a host). outer_dp_sharding_strategy="optim" also shards the optimizer
over hosts (HFSDP).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from megatron_fsdp import fully_shard


class Layer(nn.Module):
    """A residual MLP: the unit of sharding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


def main(steps: int = 20, hosts: int = 2) -> list[float]:
    """Trains on random data; returns the mean loss over ranks of every step. **Collective.**"""
    if not dist.is_initialized():
        dist.init_process_group()
    ranks = dist.get_world_size()
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device_type, (hosts, ranks // hosts), mesh_dim_names=("host", "gpu"))
    model = nn.Sequential(*(Layer(32) for _ in range(3)))
    model, optimizer = fully_shard(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        device_mesh=mesh,
        dp_outer_dim="host",
        dp_shard_dim="gpu",
        hybrid_fsdp_group=dist.group.WORLD,
        outer_dp_sharding_strategy="no_shard",
        fsdp_unit_modules=[Layer],
    )
    generator = torch.Generator().manual_seed(dist.get_rank())  # other data on every rank
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 32, generator=generator).to(device_type)
        loss = F.mse_loss(model(x), x.flip(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / ranks)
    if dist.get_rank() == 0:
        rows = [tuple(param.to_local().shape) for param in list(model.parameters())[:2]]
        print(f"{mesh}: first shards {rows}; loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
