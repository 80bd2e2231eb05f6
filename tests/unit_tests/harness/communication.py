"""Sees every collective that a rank issues, so that a test can count them or forbid them."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


class Communicated(AssertionError):
    """Something was communicated where nothing may be."""


class _Listener(TorchDispatchMode):
    def __init__(self, heard: list[str], is_forbidden: bool, groups: list[str] | None = None) -> None:
        super().__init__()
        self.heard = heard
        self.is_forbidden = is_forbidden
        self.groups = [] if groups is None else groups

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace in _NAMESPACES and "wait_tensor" not in func.name():
            name = func.name().partition("::")[2].partition(".")[0].strip("_")
            self.heard.append(name)
            self.groups.append(next(filter(None, map(_group_name, args)), ""))
            if self.is_forbidden:
                raise Communicated(f"{name} was called where nothing may be communicated")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def collectives_heard() -> Iterator[list[str]]:
    """The names of the collectives issued inside, in order ("allreduce", "broadcast", "new_group", ...)."""
    heard: list[str] = []
    with _listen(heard, is_forbidden=False):
        yield heard


@contextlib.contextmanager
def collectives_by_group() -> Iterator[dict[str, list[str]]]:
    """The same by the name of the process group; complete when the context is left."""
    heard: list[str] = []
    groups: list[str] = []
    found: dict[str, list[str]] = {}
    with _Listener(heard, is_forbidden=False, groups=groups):
        yield found
    for name, group in zip(heard, groups, strict=True):
        found.setdefault(group, []).append(name)


def _group_name(argument: Any) -> str:
    """Of a process group as operators get it."""
    if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
        return dist.ProcessGroup.unbox(argument).group_name
    return ""


@contextlib.contextmanager
def no_collectives() -> Iterator[None]:
    """Raises Communicated when something inside communicates or makes a process group."""
    with _listen([], is_forbidden=True):
        yield


@contextlib.contextmanager
def _listen(heard: list[str], *, is_forbidden: bool) -> Iterator[None]:
    make_group = dist.distributed_c10d._new_group_with_tag

    def heard_make_group(*args: Any, **kwargs: Any) -> Any:
        # Process groups meet in a store, which no dispatcher sees.
        heard.append("new_group")
        if is_forbidden:
            raise Communicated("a process group was made where nothing may be communicated")
        return make_group(*args, **kwargs)

    with mock.patch.object(dist.distributed_c10d, "_new_group_with_tag", heard_make_group):
        with _Listener(heard, is_forbidden):
            yield
