"""Parts of a random model, as plain values."""

import dataclasses
from collections.abc import Iterator
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """A part without parts."""

    kind: str
    """One of `LEAVES` in `fuzz_models`."""
    seed: int
    size: int = 3
    """Inner width, where there is one."""
    frozen: Literal["", "all", "first"] = ""
    is_whole: bool = False
    """Marked by `fsdp_no_shard`."""
    is_half: bool = False
    """Its parameters are bfloat16, whatever those of the others are."""
    tie: int = 0
    """Leaves with the same number share their first parameter; 0: none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a child."""

    child: int
    skip: Literal["", "step", "rank"] = ""
    """Left out by a coin that falls for all ranks alike, or for each rank differently."""
    site: int = 0
    """Index of the coin; all calls of one child share it."""
    recompute: Literal["", "reentrant", "plain"] = ""
    mode: Literal["positional", "keyword", "no_grad"] = "positional"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Node:
    """A part made of parts. A child that no call names is registered and never runs."""

    cls: Literal["A", "B", "C"]
    children: tuple["Node | Leaf", ...]
    calls: tuple[Call, ...]
    output: Literal["tensor", "tuple", "dict", "dataclass", "object"] = "tensor"
    has_autocast: bool = False
    is_rotating: bool = False
    """The calls' order changes from one micro-batch to the next, on all ranks alike."""


def leaves_of(part: Node | Leaf) -> Iterator[Leaf]:
    """Every leaf, in the order in which the modules are registered."""
    if isinstance(part, Leaf):
        yield part
    else:
        for child in part.children:
            yield from leaves_of(child)
