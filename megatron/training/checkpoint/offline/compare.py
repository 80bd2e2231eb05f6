"""Comparison of two checkpoints, tensor by tensor."""

from dataclasses import dataclass
from typing import Any

import torch

from megatron.training.checkpoint.offline.lazy_reader import ARGUMENTS, Entry, Source


@dataclass(frozen=True)
class Comparison:
    """Differences found, and the number of names without one."""

    lines: tuple[str, ...]
    """One for each name that differs."""
    equal: int
    """Number of names that do not differ."""


def compare_entries(one: Source, other: Source, *, rtol: float, atol: float, only: str = "") -> Comparison:
    """Compares what has names that begin with `only`; two tensors at a time are in memory."""
    one, other = ({name: source[name] for name in source if name.startswith(only)} for source in (one, other))
    lines = [f"only in the first: {name}" for name in sorted(one.keys() - other.keys())]
    lines += [f"only in the second: {name}" for name in sorted(other.keys() - one.keys())]
    both = sorted(one.keys() & other.keys())
    texts = [_difference(one[name], other[name], name, rtol, atol) for name in both]
    different = [f"{name}: {text}" for name, text in zip(both, texts, strict=True) if text]
    return Comparison((*lines, *different), len(both) - len(different))


def _difference(one: Any, other: Any, name: str, rtol: float, atol: float) -> str | None:
    if name == ARGUMENTS:
        one, other = vars(one), vars(other)
        keys = sorted(key for key in {*one, *other} if one.get(key) != other.get(key))
        return f"{', '.join(keys)} differ" if keys else None
    if not isinstance(one, Entry) or not isinstance(other, Entry):
        return None if _same_value(one, other) else f"{one!r:.60} and {other!r:.60}"
    if one.shape != other.shape:
        return f"shapes {tuple(one.shape)} and {tuple(other.shape)}"
    if one.dtype != other.dtype:
        return f"dtypes {one.dtype} and {other.dtype}"
    return _element_difference(one.read(), other.read(), rtol, atol)


def _same_value(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return list(one) == list(other)
    return type(one) is type(other) and one == other


def _element_difference(one: torch.Tensor, other: torch.Tensor, rtol: float, atol: float) -> str | None:
    if torch.equal(one, other):
        return None
    wide = torch.float64 if one.dtype.is_floating_point else torch.int64
    wide = one.dtype if one.dtype.is_complex else wide
    one, other = one.to(wide), other.to(wide)
    if torch.allclose(one, other, rtol=rtol, atol=atol, equal_nan=True):
        return None
    distance = (one - other).abs()
    allowed = atol + rtol * other.abs()
    bad = ~((distance <= allowed) | (one.isnan() & other.isnan()))
    largest = distance[bad].max().item()
    return f"{int(bad.sum())} of {bad.numel()} elements differ, by up to {largest:.6g}"
