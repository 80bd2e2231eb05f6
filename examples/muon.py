"""Muon for the matrices of the layers, AdamW for the rest, sharded over all ranks.

    torchrun --nproc-per-node 2 examples/muon.py

Muon orthogonalizes whole matrices, so `fsdp_single_owner` gives each matrix to one rank, which updates it alone; ranks
own about as much each. Everything else is sharded row by row.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from megatron_fsdp import fsdp_single_owner, fully_shard_model, fully_shard_optimizer


class Layer(nn.Module):
    """A residual MLP: the unit of sharding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """Predicts the next token from the present one."""

    def __init__(self, vocabulary: int = 64, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.Sequential(*(Layer(width) for _ in range(depth)))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(tokens)))


def is_for_muon(name: str, param: nn.Parameter) -> bool:
    """True for the matrices of layers; embeddings, the head and biases are AdamW's."""
    return "layers." in name and param.ndim == 2


def main(steps: int = 20) -> list[float]:
    """Trains on a fixed permutation of tokens; returns this rank's loss of every step. **Collective.**"""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    module = Model()
    for name, param in module.named_parameters():
        if is_for_muon(name, param):
            fsdp_single_owner(param)
    model = fully_shard_model(module, fsdp_unit_modules=[Layer])
    named = list(model.named_parameters())  # from the sharded model
    optimizers = [
        fully_shard_optimizer(torch.optim.Muon([p for name, p in named if is_for_muon(name, p)], lr=2e-2)),
        fully_shard_optimizer(torch.optim.AdamW([p for name, p in named if not is_for_muon(name, p)], lr=1e-2)),
    ]
    successor = torch.randperm(64, generator=torch.Generator().manual_seed(0)).to(device_type)
    generator = torch.Generator().manual_seed(dist.get_rank())  # other data on every rank
    losses = []
    for _ in range(steps):
        tokens = torch.randint(64, (256,), generator=generator).to(device_type)
        loss = F.cross_entropy(model(tokens), successor[tokens])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:  # each drops the gradients of its own parameters
            optimizer.zero_grad()
        losses.append(loss.item())
    owned = sum(p.to_local().numel() > 0 for name, p in named if is_for_muon(name, p))
    print(f"rank {dist.get_rank()} owns {owned} matrices; loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
