"""Names of parameters in checkpoints: pure rules over names and row numbers.

In memory a parameter has the user's name and this rank's place in tensor and expert parallelism. Stored, it has names
that mean the same on any number of ranks, which are Megatron-LM's: each handler below turns a piece into the pieces
that are stored instead of it. `unsplit` leaves out handlers that cut, as older checkpoints of this package did.
"""

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Piece(NamedTuple):
    """A range of rows in a tensor-parallel rank's part of a parameter, with its name."""

    name: str
    first: int
    row_count: int


class Part(NamedTuple):
    """Rows of a fused parameter that mean one thing."""

    name: str
    rows: int


@dataclass(frozen=True, kw_only=True)
class NamingContext:
    """Facts about the layer of a parameter that its stored names depend on."""

    is_gated: bool = False
    """Its layer's MLP computes activation(gate) * up with one weight [gate; up]."""
    first_expert: int = 0
    """The global number of this rank's first expert."""
    query_latent_rows: int | None = None
    """Of multi-latent attention, the rows of the fused down-projection that make queries."""
    parts: tuple[Part, ...] = ()
    """Parts of a fused projection or convolution of linear attention or a state-space layer, in the order of rows."""
    renames_mtp: bool = True
    """Layers of multi-token prediction are called as Megatron-LM stores them."""


Handler = Callable[[Piece, NamingContext], Iterator[Piece]]

_GATED = re.compile(
    r"(^|\.)mlp\.((shared_experts\.|experts\.local_experts\.\d+\.)?linear_fc1\.(weight|bias)"
    r"|experts\.linear_fc1\.(weight|bias)\d+)$"
)
_EXPERT = re.compile(
    r"(?P<head>(?:^|\.)mlp\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))(?P<number>\d+)(?P<tail>(?:\.|_[wv])?)"
)
_FUSED_LATENT = re.compile(r"(?P<layer>(?:^|.*\.))self_attention\.linear_qkv_down_proj\.(?P<leaf>\w+)$")
DELTA_NET = {
    "in_proj": ("query", "key", "value", "z", "beta", "alpha"),
    "conv1d": ("query", "key", "value"),
}
MAMBA = {"in_proj": ("z", "x", "B", "C", "dt"), "conv1d": ("x", "B", "C")}
"""Parts that gated delta-net and Mamba layers fuse, in the order of rows, under megatron-core's names."""
GATED_ENDS = ("_w", "_v")
"""Suffixes of a gated weight's name for its two halves."""
_ENDS = {child: tuple(tuple(f".{part}" for part in kind[child]) for kind in (DELTA_NET, MAMBA)) for child in DELTA_NET}
"""By child: for each kind of layer the suffixes of its parts, in the order of rows."""
_PART = re.compile(r"(?P<whole>(?:^|.*\.)(?P<child>in_proj|conv1d)\.(?:weight|bias))(?P<end>\.\w+)$")
_MTP = re.compile(r"((?:^|\.)mtp\.layers\.\d+\.)mtp_model_layer\.")


def split_gated(piece: Piece, context: NamingContext) -> Iterator[Piece]:
    """[gate; up] as two tensors, each cut over tensor-parallel ranks by itself, so that their number may change."""
    if not (context.is_gated and _GATED.search(piece.name)):
        yield piece
        return
    half = piece.row_count // 2
    yield Piece(f"{piece.name}_w", piece.first, half)
    yield Piece(f"{piece.name}_v", piece.first + half, half)


def split_fused_latent(piece: Piece, context: NamingContext) -> Iterator[Piece]:
    """The fused down-projection of multi-latent attention under the names of the two that it consists of."""
    found = _FUSED_LATENT.match(piece.name)
    rows = context.query_latent_rows
    if found is None or rows is None:
        yield piece
    elif (leaf := found["leaf"]).startswith("layer_norm_"):
        yield piece._replace(name=f"{found['layer']}input_layernorm.{leaf.removeprefix('layer_norm_')}")
    else:
        attention = f"{found['layer']}self_attention."
        yield Piece(f"{attention}linear_q_down_proj.{leaf}", piece.first, rows)
        yield Piece(f"{attention}linear_kv_down_proj.{leaf}", piece.first + rows, piece.row_count - rows)


def split_parts(piece: Piece, context: NamingContext) -> Iterator[Piece]:
    """Each part of a fused projection or convolution by itself, as ranks cut it."""
    if not context.parts:
        yield piece
        return
    first = piece.first
    for part in context.parts:
        yield Piece(f"{piece.name}.{part.name}", first, part.rows)
        first += part.rows


def number_experts(piece: Piece, context: NamingContext) -> Iterator[Piece]:
    """Experts by their number in the model, not on the rank."""
    yield piece._replace(name=shift_expert(piece.name, context.first_expert))


def name_mtp(piece: Piece, context: NamingContext) -> Iterator[Piece]:
    """The layer inside a multi-token prediction layer under one name for all versions of megatron-core."""
    yield piece._replace(name=_MTP.sub(r"\1transformer_layer.", piece.name)) if context.renames_mtp else piece


CUTTING: tuple[Handler, ...] = (split_gated, split_fused_latent, split_parts)
RENAMING: tuple[Handler, ...] = (number_experts, name_mtp)


def stored_pieces(name: str, rows: int, context: NamingContext, *, unsplit: bool = False) -> list[Piece]:
    """The pieces that are stored for parameter `name`, of which each tensor-parallel rank has `rows`."""
    pieces = [Piece(name, 0, rows)]
    for handler in RENAMING if unsplit else (*CUTTING, *RENAMING):
        pieces = [made for piece in pieces for made in handler(piece, context)]
    return pieces


def stored_name(name: str, context: NamingContext) -> str:
    """The stored name of a parameter in one piece, under which the optimizer's options for it are stored."""
    return stored_pieces(name, 0, context, unsplit=True)[0].name


def shift_expert(name: str, by: int) -> str:
    """`name` with the number of its expert raised."""
    return _EXPERT.sub(lambda found: f"{found['head']}{int(found['number']) + by}{found['tail']}", name, count=1)


def expert_number(name: str) -> int | None:
    """The number of the expert that a parameter belongs to; None outside experts."""
    found = _EXPERT.search(name)
    return int(found["number"]) if found else None


def without_expert(name: str) -> str:
    """`name` with a star for its expert's number: the same for all experts."""
    return _EXPERT.sub(lambda found: f"{found['head']}*{found['tail']}", name, count=1)


def canonical(name: str) -> str:
    """A stored name without wrappers' prefixes, with one name for the layer inside MTP layers, whoever wrote it."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return _MTP.sub(r"\1transformer_layer.", name)


class PartName(NamedTuple):
    """The name of one part of a parameter: the parameter's, and a suffix."""

    whole: str
    end: str


def part_name(name: str) -> PartName | None:
    """A stored name as that of a part of a gated weight, or of what delta-net and Mamba layers fuse; None for others.

    The fused projection of latent attention is not among them: its parts have names of their own.
    """
    if name.endswith(GATED_ENDS) and _GATED.search(name[:-2]):
        return PartName(name[:-2], name[-2:])
    found = _PART.match(name)
    if found is None or not any(found["end"] in ends for ends in _ENDS[found["child"]]):
        return None
    return PartName(found["whole"], found["end"])


def in_order(whole: str, ends: Collection[str]) -> tuple[str, ...] | None:
    """The ends of the names of all parts of `whole` in the order of its rows; None if some are missing."""
    known = _ENDS.get(whole.split(".")[-2], (GATED_ENDS,))
    return next((each for each in known if set(each) == set(ends)), None)
