"""Threads that read or write parts of one checkpoint: even parts, on the GPU of the rank."""

import functools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

_MOST_THREADS = 8
_THREAD_NBYTES = 256 << 20
"""A rank that reads or writes more takes another thread."""


def thread_count(nbytes: int) -> int:
    """Threads for `nbytes` bytes of one rank."""
    return min(_MOST_THREADS, 1 + nbytes // _THREAD_NBYTES)


def even_parts(items: Iterable[Item], count: int, nbytes: Callable[[Item], int]) -> list[list[Item]]:
    """`items` in `count` parts of about the same size: the largest first, each to the smallest part so far."""
    parts: list[list[Item]] = [[] for _ in range(count)]
    sizes = [0] * count
    for item in sorted(items, key=nbytes, reverse=True):
        least = sizes.index(min(sizes))
        parts[least].append(item)
        sizes[least] += nbytes(item) or 1
    return parts


def in_threads(function: Callable[..., Result], *arguments: Sequence[Any]) -> list[Result]:
    """`function` of the first, second, ... of all `arguments`, at the same time; raises the first one's error."""
    with ThreadPoolExecutor(min(_MOST_THREADS, len(arguments[0]) or 1), initializer=on_this_device()) as threads:
        return list(threads.map(function, *arguments))


def on_this_device() -> Callable[[], None]:
    """Initializer of a thread that shall use the GPU of the thread that calls this; its default is the first GPU."""
    if not torch.cuda.is_initialized():
        return lambda: None
    return functools.partial(torch.cuda.set_device, torch.cuda.current_device())
