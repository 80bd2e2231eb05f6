"""Random layouts: what each rank holds tiles the parameters, and whole tensors come out of it and go into it again."""

import math
import random

import pytest
import torch
from torch import nn

from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.harness.sharded import Sharding, shard

#: Dims that divide nothing, and some that divide everything.
LENGTHS = (0, 1, 2, 3, 5, 7, 8, 13, 16, 31, 64)


class Parameters(nn.Module):
    """Parameters of random shapes, whose sum a forward could use."""

    def __init__(self, seed: int):
        super().__init__()
        draw = random.Random(seed)
        for number in range(draw.randint(1, 9)):
            shape = [draw.choice(LENGTHS) for _ in range(draw.choice((0, 1, 1, 2, 2, 2, 3)))]
            value = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + 1000 * number
            self.register_parameter(f"p{number}", nn.Parameter(value, requires_grad=draw.random() < 0.8))


def job_random(seeds: range, strategy: int, outer: int | None) -> list[dict]:
    """By seed: shapes, and of each parameter this rank's offsets and sizes, and how many ranks hold the same."""
    found = []
    for seed in seeds:
        torch.manual_seed(0)
        originals = {name: param.detach().clone() for name, param in Parameters(seed).named_parameters()}
        model = shard(Parameters(seed), Sharding(strategy=strategy, outer=outer))
        boxes = {}
        for name, param in model.module.named_parameters():
            whole, original = param.full_tensor(), originals[name]
            assert whole.shape == param.shape == original.shape and torch.equal(whole, original), (seed, name)
            spec = param.megatron_fsdp_spec
            again = spec.take(original + 1, name)
            assert torch.equal(again.full_tensor(), original + 1) and spec.fits(again), (seed, name)
            flat = original.flatten()[param.megatron_fsdp_slice]
            assert torch.equal(param.to_local().flatten(), flat), (seed, name)
            (chunk,) = param.__create_chunk_list__()
            # A frozen weight is cut over fewer axes than a trained one: nothing updates it.
            sizes = zip(param.device_mesh.shape, param.placements, strict=True)
            copies = math.prod(size for size, placement in sizes if placement.is_replicate())
            boxes[name] = (tuple(chunk.offsets), tuple(chunk.sizes), copies)
        shapes = {name: tuple(value.shape) for name, value in originals.items()}
        found.append({"shapes": shapes, "boxes": boxes})
    return found


CASES = [(2, 3, None), (3, 3, None), (3, 1, None), (4, 3, 0), (4, 3, 1), (4, 2, None)]


@pytest.mark.parametrize(("world", "strategy", "outer"), CASES)
def test_shards_of_random_layouts_tile_their_parameters(
    rank_pools: dict[int, RankPool], world: int, strategy: int, outer: int | None
) -> None:
    by_rank = rank_pools[world].run(job_random, range(12), strategy, outer)
    for runs in zip(*by_rank, strict=True):
        for name, shape in runs[0]["shapes"].items():
            boxes = [run["boxes"][name] for run in runs]
            copies = boxes[0][2]
            if copies == world:
                assert all(sizes == shape for _, sizes, _ in boxes)
                continue
            pieces = sorted({(offsets[0], sizes[0]) for offsets, sizes, _ in boxes if sizes[0]})
            assert sum(sizes[0] for _, sizes, _ in boxes) == copies * shape[0], (name, boxes)
            end = 0
            for first, count in pieces:
                assert first == end, (name, boxes)
                end = first + count
            assert end == shape[0] and all(sizes[1:] == shape[1:] for _, sizes, _ in boxes)
