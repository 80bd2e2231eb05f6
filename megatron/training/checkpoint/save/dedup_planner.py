"""Planning many tensors: options of the optimizer once each, however many parameters have them.

A model of 10,000 parameters has over 100,000 options and counts of steps, of which a few dozen differ, and all ranks
have the same. So one rank speaks for those that have the same names, one name stands for all with the same value, and
in the files' index the others point to its place. Readers of torch's distributed checkpoint need not know.
"""

import dataclasses
import hashlib
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from megatron.training.checkpoint.format.flatten import paths

_OF_PARAMETERS = ("model.", "optimizer.state.", "optimizer.param_to_group_meta.")
"""Beginnings of the names that every rank has which has the same parameters."""
_SHARED = ("optimizer.state.", "optimizer.param_to_group_meta.")
"""Beginnings of names whose values, if they are no shards, repeat themselves from parameter to parameter."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """Additions of one rank to its plan's items."""

    paths: dict[str, tuple]
    """Flattened name -> keys of the nested dict, as readers build that again."""
    same: dict[str, str]
    """Name of what is not written -> name of the same value, which is."""


class DedupPlanner(DefaultSavePlanner):
    """Plans a nested dict; on the first rank `same` then tells which names point to the places of others.

    Args:
        is_owner: this rank plans the values that all ranks with the same parameters have alike.
    """

    def __init__(self, *, is_owner: bool) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._is_owner = is_owner
        self._table = Table(paths={}, same={})
        self.same: dict[str, str] = {}
        """Of all ranks."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Takes what is to be saved."""
        leaves: dict[str, Any] = {}
        at: dict[str, tuple] = {}
        for path, value in paths(state_dict):
            name = ".".join(path)
            leaves[name], at[name] = value, path
        shared = {name: value for name, value in leaves.items() if _is_shared(name, value)}
        if self._is_owner:
            same = find_duplicates(shared)
            skipped = same.keys()
        else:
            same, skipped = {}, shared.keys()
            at = {name: path for name, path in at.items() if not name.startswith(_OF_PARAMETERS)}
        self._table = Table(paths=at, same=same)
        planned = {name: value for name, value in leaves.items() if name not in skipped}
        super().set_up_planner(planned, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        """The plan of this rank's writes, with its table; the first rank keeps its own."""
        plan = super().create_local_plan()
        return plan if self.is_coordinator else dataclasses.replace(plan, planner_data=self._table)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The plans of all ranks, and the index without places. On the first rank."""
        tables = [self._table, *(plan.planner_data for plan in all_plans if plan.planner_data is not None)]
        plans, metadata = super().create_global_plan(
            [dataclasses.replace(plan, planner_data=None) for plan in all_plans]
        )
        known = metadata.state_dict_metadata
        for table in tables:
            for name, other in table.same.items():
                if name not in known:
                    known[name] = known[other]
                    self.same[name] = other
        merged: dict[str, tuple] = {}
        for table in reversed(tables):
            merged.update(table.paths)
        return plans, dataclasses.replace(metadata, planner_data=merged)


def with_duplicates(places: dict[MetadataIndex, Any], same: Mapping[str, str]) -> dict[MetadataIndex, Any]:
    """`places` with those of the names that share another's."""
    by_name = {index.fqn: index for index in places}
    shared = {dataclasses.replace(by_name[other], fqn=name): places[by_name[other]] for name, other in same.items()}
    return {**shared, **places}


def is_plan_owner(leaves: Iterable[str], device: torch.device) -> bool:
    """True on the first of the ranks with parameters of these names. **Collective.**"""
    names = "\n".join(sorted(name for name in leaves if name.startswith(_OF_PARAMETERS)))
    digest = torch.frombuffer(bytearray(hashlib.sha256(names.encode()).digest()), dtype=torch.uint8).to(device)
    everyone = [torch.empty_like(digest) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, digest)
    return torch.stack(everyone).cpu().tolist().index(digest.cpu().tolist()) == dist.get_rank()


def find_duplicates(leaves: Mapping[str, Any]) -> dict[str, str]:
    """Of values that are the same bit for bit: each name but the first -> the first."""
    first: dict[Any, str] = {}
    same = {}
    for name, value in _comparable(leaves).items():
        if (other := first.setdefault(value, name)) is not name:
            same[name] = other
    return same


def _comparable(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """A hashable form of each value, the same for equal values; copies from each GPU once."""
    tensors: dict[tuple, list[str]] = {}
    found: dict[str, Any] = {}
    pickled: dict[int, bytes] = {}
    for name, value in leaves.items():
        if isinstance(value, torch.Tensor):
            tensors.setdefault((value.dtype, value.device), []).append(name)
            found[name] = None  # Keeps the order.
        else:  # Parameters of a group have one and the same object.
            key = id(value)
            found[name] = pickled[key] if key in pickled else pickled.setdefault(key, pickle.dumps(value))
    for (dtype, _), names in tensors.items():
        numbers = torch.stack([leaves[name].detach() for name in names]).cpu()
        rows = numbers.view(len(names), 1).view(torch.uint8).numpy()
        found.update({name: (dtype, row.tobytes()) for name, row in zip(names, rows, strict=True)})
    return found


def _is_shared(name: str, value: Any) -> bool:
    """True for a number or an option, not a shard."""
    if not name.startswith(_SHARED) or isinstance(value, DTensor):
        return False
    return not isinstance(value, torch.Tensor) or value.dim() == 0
