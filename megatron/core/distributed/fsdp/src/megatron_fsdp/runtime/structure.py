"""Notices what has become of a model's parameters since it was sharded, before a forward communicates."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from megatron_fsdp.machine.torch_compat import local_tensor, storage_id
from megatron_fsdp.runtime.unit import ManagedParam, Unit

_WHAT_TO_DO = "change values in place or inside full_params(), and structure before sharding."


class Structure:
    """Which parameters and modules a sharded model has.

    All is compared at once, in native code; one by one, at some microseconds each, to say what has become different.
    """

    def __init__(self, root: nn.Module, units: Sequence[Unit]):
        modules = list(root.named_modules())
        # Their dictionaries, not the modules: a removed one is not kept alive by this.
        self._modules = [_Contents.of(name, module) for name, module in modules]
        parameters = {id(module): module._parameters for _, module in modules}
        self._places = [(unit, list(_places(unit, parameters))) for unit in units]
        self._memory = [
            (param.sharded, local_tensor(param.sharded), storage_id(param.sharded), param)
            for unit in units
            for param in unit.params
        ]
        self._units = units
        self._trained = [(param.sharded, param.raw.requires_grad, param) for _, _, _, param in self._memory]
        self._children = [contents.modules for contents in self._modules]
        self._known_children = _Snapshot.of(self._children)
        self._empty = [(contents.parameters, name) for contents in self._modules for name in contents.empty]
        forms = {
            (id(held), name): (raw, sharded) for _, places in self._places for held, name, raw, sharded, _ in places
        }
        self._holders = [
            (unit, _Holder.of({id(place[0]): place[0] for place in places}.values(), forms))
            for unit, places in self._places
        ]
        self._sharded = [sharded for sharded, _, _, _ in self._memory]
        self._locals = [local for _, local, _, _ in self._memory]
        self._storages = [sharded.untyped_storage() for sharded in self._sharded]  # kept, or each would be made anew
        self._frozenness = [requires_grad for _, requires_grad, _ in self._trained]

    def check(self) -> None:
        """Raises if the model is another one than was sharded. No communication; all ranks make the same mistake.

        Raises:
            RuntimeError: a parameter was replaced, removed or added, its `data` or `requires_grad` was set, or a module
                with parameters was replaced, removed or added; or values were changed that no forward would see.
        """
        if not self._has_same_modules():
            for contents in self._modules:
                contents.check()
            self._known_children = _Snapshot.of(self._children)
        if not all(holder.holds(raw=unit.shows_raw) for unit, holder in self._holders):
            self._check_places()
        self._check_memory()
        for unit in self._units:
            for group in unit.groups:
                if group.is_stale:
                    raise RuntimeError(
                        f"{', '.join(group.facts.fqns)} of unit {unit.label} have other values than the model computes "
                        "with: they were changed without its knowledge. Step with the optimizer that "
                        "fully_shard_optimizer() or fully_shard() gives back; after other changes call "
                        "install_optimized_model_weights()."
                    )
        if torch.is_grad_enabled() and list(map(_requires_grad, self._sharded)) != self._frozenness:
            for sharded, requires_grad, param in self._trained:
                if sharded.requires_grad is not requires_grad:
                    check_frozenness([param])

    def _has_same_modules(self) -> bool:
        """No module was put in another's place, and none holds more or fewer parameters."""
        if not self._known_children.is_of(self._children):
            return False
        if not all(len(contents.parameters) == len(contents.param_names) for contents in self._modules):
            return False
        return all(held.get(name) is None for held, name in self._empty)

    def _check_places(self) -> None:
        for unit, places in self._places:
            shows_raw = unit.shows_raw
            for held, name, raw, sharded, fqn in places:
                if held.get(name) is not (raw if shows_raw else sharded):
                    how = "replaced" if held.get(name) is not None else "removed"
                    raise RuntimeError(f"{fqn} was {how} after sharding, and would not be trained; {_WHAT_TO_DO}")

    def _check_memory(self) -> None:
        is_same = all(map(operator.is_, map(local_tensor, self._sharded), self._locals)) and all(
            map(operator.is_, map(_storage, self._sharded), self._storages)
        )
        if is_same:
            return
        for sharded, local, storage, param in self._memory:
            if local_tensor(sharded) is not local or storage_id(sharded) != storage:
                raise RuntimeError(f"{param.fqn}.data was set after sharding, which changes nothing; {_WHAT_TO_DO}")


_requires_grad = operator.attrgetter("requires_grad")
_storage = operator.methodcaller("untyped_storage")


def _values(dictionaries: Iterable[dict]) -> Iterator[object]:
    return itertools.chain.from_iterable(map(dict.values, dictionaries))


@dataclasses.dataclass
class _Snapshot:
    """What dictionaries hold, under which names."""

    names: list[str]
    sizes: list[int]
    values: list[object]

    @classmethod
    def of(cls, dictionaries: Sequence[dict]) -> _Snapshot:
        return cls(
            list(itertools.chain.from_iterable(dictionaries)), list(map(len, dictionaries)), list(_values(dictionaries))
        )

    def is_of(self, dictionaries: Sequence[dict]) -> bool:
        """They hold it still, in the same order."""
        if (
            list(map(len, dictionaries)) != self.sizes
            or list(itertools.chain.from_iterable(dictionaries)) != self.names
        ):
            return False
        return all(map(operator.is_, _values(dictionaries), self.values))


@dataclasses.dataclass
class _Holder:
    """The places of a unit's parameters: modules' dictionaries, and what they hold in both forms."""

    dictionaries: list[dict[str, nn.Parameter | None]]
    raw: _Snapshot
    sharded: _Snapshot

    @classmethod
    def of(
        cls,
        dictionaries: Iterable[dict[str, nn.Parameter | None]],
        forms: dict[tuple[int, str], tuple[nn.Parameter, nn.Parameter]],
    ) -> _Holder:
        """`forms` of what lies where; what is not there has one only."""
        held = list(dictionaries)
        found = [forms.get((id(each), name), (value, value)) for each in held for name, value in each.items()]
        now = _Snapshot.of(held)
        raw, sharded = (dataclasses.replace(now, values=[pair[form] for pair in found]) for form in (0, 1))
        return cls(held, raw, sharded)

    def holds(self, *, raw: bool) -> bool:
        """All of them show this form."""
        return (self.raw if raw else self.sharded).is_of(self.dictionaries)


def _places(unit: Unit, parameters: dict[int, dict]) -> Iterator[tuple[dict, str, nn.Parameter, nn.Parameter, str]]:
    """Which dictionary holds which parameter under which name, in its two forms."""
    for param in unit.params:
        for place, fqn in zip(param.places, param.fqns, strict=True):
            yield parameters[id(place.module())], place.name, param.raw, param.sharded, fqn


def check_frozenness(params: Iterable[ManagedParam]) -> None:
    """Raises RuntimeError if a parameter has been frozen or unfrozen since it was sharded."""
    for param in params:
        if param.sharded.requires_grad != param.raw.requires_grad:
            raise RuntimeError(
                f"{param.fqn}.requires_grad has become {param.sharded.requires_grad} after sharding, which decides "
                "once whether there is a gradient; freeze parameters before sharding."
            )


@dataclasses.dataclass
class _Contents:
    """The parameters and children of one module."""

    name: str
    parameters: dict[str, nn.Parameter | None]
    param_names: tuple[str, ...]
    empty: tuple[str, ...]
    """Names under which a parameter could be, and none was."""
    modules: dict[str, nn.Module | None]
    children: tuple[nn.Module | None, ...]

    @classmethod
    def of(cls, name: str, module: nn.Module) -> _Contents:
        """What `module` holds now."""
        held = module._parameters
        empty = tuple(each for each, value in held.items() if value is None)
        return cls(name, held, tuple(held), empty, module._modules, tuple(module._modules.values()))

    def check(self) -> None:
        for name in self.empty:
            if self.parameters.get(name) is not None:
                self._refuse(f"parameter {self._fqn(name)} was added")
        if len(self.parameters) != len(self.param_names):
            for name in self.parameters.keys() - set(self.param_names):
                if self.parameters[name] is not None:
                    self._refuse(f"parameter {self._fqn(name)} was added")
        if len(self.modules) != len(self.children) or tuple(self.modules.values()) != self.children:
            known = set(map(id, self.children))
            for name, child in self.modules.items():
                if child is not None and id(child) not in known and next(child.parameters(), None) is not None:
                    self._refuse(f"module {self._fqn(name)} with parameters of its own was added")
            gone = {id(child): child for child in self.children if child is not None}
            for child in self.modules.values():
                gone.pop(id(child), None)
            if any(next(child.parameters(), None) is not None for child in gone.values()):
                self._refuse(f"a module of {self.name or 'the root'} with sharded parameters was removed")
            self.children = tuple(self.modules.values())  # only what holds no parameters has changed

    def _fqn(self, name: str) -> str:
        return f"{self.name}.{name}" if self.name else name

    def _refuse(self, what: str) -> None:
        raise RuntimeError(f"{what} after sharding; {_WHAT_TO_DO}")
