"""Nested dicts and their flattened names, as torch's distributed checkpoint joins them."""

from collections.abc import Iterator, Mapping
from typing import Any


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested names joined by dots, as torch's distributed checkpoint stores them."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flattened(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


def paths(values: Mapping[str, Any], before: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    """Each leaf, after the keys on the way to it."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from paths(value, (*before, name))
        else:
            yield (*before, name), value


def with_leaves(values: Mapping[str, Any], leaves: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`values` with those of its leaves that `leaves` has by their flattened names, and without the others."""
    kept = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            kept[key] = with_leaves(value, leaves, f"{prefix}{key}.")
        elif prefix + key in leaves:
            kept[key] = leaves[prefix + key]
    return kept
