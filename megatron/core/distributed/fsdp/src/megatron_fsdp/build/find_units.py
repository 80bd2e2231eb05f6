"""Discovery of units, and of the unit that owns each parameter."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import pkgutil
import weakref
from collections.abc import Collection, Sequence

from torch import nn

from megatron_fsdp.runtime.unit import ManagedParam, Place
from megatron_fsdp.state.param_tags import is_no_shard

#: A module outside every named unit that directly owns this many elements (an embedding, an output layer) becomes a
#: unit of its own: as a part of the root it would stay gathered from the first layer's forward to its backward.
LARGE_LEFTOVER_NUMEL = 1 << 22


@dataclasses.dataclass
class UnitPlan:
    """A unit before its groups exist."""

    fqn: str
    module: nn.Module
    params: list[ManagedParam] = dataclasses.field(default_factory=list)

    @property
    def is_root(self) -> bool:
        """The unit of the whole model."""
        return not self.fqn


def resolve_unit_classes(
    unit_modules: Sequence[type | str] | None, option: str = "fsdp_unit_modules"
) -> tuple[type, ...]:
    """The module classes that `option` lists, with import paths resolved.

    Raises:
        ImportError: a path does not lead to anything.
        TypeError: an entry is neither a module class nor a path to one.
    """
    if isinstance(unit_modules, (str, type)):
        raise TypeError(f"{option} is {unit_modules!r}; expected a list of classes or import paths, even of only one.")
    classes = []
    for entry in unit_modules or ():
        try:
            found = pkgutil.resolve_name(entry) if isinstance(entry, str) else entry
        except (ImportError, AttributeError, ValueError) as error:
            raise ImportError(
                f"{option} holds {entry!r}, which cannot be imported ({error}); "
                "give the full dotted path of a module class, or the class itself."
            ) from error
        if not (isinstance(found, type) and issubclass(found, nn.Module)):
            raise TypeError(f"{option} holds {entry!r}; expected torch.nn.Module classes or import paths to them.")
        classes.append(found)
    return tuple(classes)


def plan_units(
    root: nn.Module,
    classes: tuple[type, ...],
    root_params: Collection[nn.Parameter] = (),
    fine_grained: tuple[type, ...] = (),
) -> list[UnitPlan]:
    """Units in the order of `root.modules()`, the root first; every parameter belongs to exactly one.

    A parameter belongs to the innermost unit that contains every module that holds it, so a tied one moves up to
    the common ancestor. `root_params` are read outside their owner's forward and belong to the root. Inside a unit,
    instances of `fine_grained` are cut up: each of their modules that owns parameters is a unit of its own.

    Raises:
        ValueError: `classes` match no module of `root`, or one without a forward; or `root_params` are not its
            parameters.
    """
    _check_root_params(root, root_params)
    params = _managed_params(root)
    of_root = {id(param) for param in root_params}
    shared = {id(param.unsharded) for param in params if len(param.places) > 1}
    chosen = {root, *_unit_modules(root, classes, fine_grained, shared | of_root)}
    units = {name: UnitPlan(name, module) for name, module in root.named_modules() if module in chosen}
    for param in params:
        chains = [_units_around(fqn, units) for fqn in param.fqns]
        innermost = next(name for name in chains[0] if all(name in chain for chain in chains))
        units["" if id(param.unsharded) in of_root else innermost].params.append(param)
    for unit in units.values():
        if unit.params and not unit.is_root and not _is_run(unit.module):
            items = sorted({type(child).__name__ for child in unit.module.children()})
            raise ValueError(
                f"fsdp_unit_modules names {type(unit.module).__name__}, which has no forward; name "
                + (f"the class of its items ({', '.join(items)})." if items else "the class of the module around it.")
            )
    return [unit for unit in units.values() if unit.params or unit.is_root]


def repeated_layer(root: nn.Module) -> type | None:
    """The class that most parameters are of, of those that occur several times in one module; None if none does."""
    numels: collections.Counter[type] = collections.Counter()
    for module in root.modules():
        layers = [child for child in module.children() if _is_run(child)]
        classes = collections.Counter(map(type, layers))
        for layer in layers:
            if classes[type(layer)] > 1:
                numels[type(layer)] += sum(param.numel() for param in layer.parameters())
    found = numels.most_common(1)
    return found[0][0] if found and found[0][1] else None


def _unit_modules(
    root: nn.Module, classes: tuple[type, ...], fine_grained: tuple[type, ...], public: set[int]
) -> list[nn.Module]:
    """Modules below `root` to be gathered by themselves; others than their owner read the parameters `public`."""
    modules = list(root.modules())
    units = [module for module in modules if isinstance(module, classes)] if classes else []
    if classes and not units:
        wanted = ", ".join(cls.__name__ for cls in classes)
        present = ", ".join(sorted({type(module).__name__ for module in modules}))
        raise ValueError(f"no module of {type(root).__name__} is a {wanted}; classes present are: {present}.")
    # Parameters that are whole on every rank are never gathered: they join the unit around them, without hooks.
    units = [module for module in units if not all(map(is_no_shard, module.parameters()))]
    owners = [module for module in modules if _is_run(module) and not all(map(is_no_shard, _own_params(module)))]
    if classes:
        inside = {root, *(part for unit in units for part in unit.modules())}
        units += [module for module in owners if module not in inside and _is_large(module, public)]
    around = units if classes else [root]
    cut = [part for unit in around for part in unit.modules() if isinstance(part, fine_grained)]
    below = {module for part in cut for module in part.modules()}
    units += [module for module in owners if module in below and module not in around]
    # `nn.MultiheadAttention` computes with its output projection's parameters itself, and never calls it.
    read = {module.out_proj for module in modules if isinstance(module, nn.MultiheadAttention)}
    return [module for module in units if module not in read]


def _is_run(module: nn.Module) -> bool:
    """`module` has a forward, so that hooks can say when it computes; containers of parameters have none."""
    return type(module).forward is not nn.Module.forward


def _is_large(module: nn.Module, public: set[int]) -> bool:
    """`module` directly owns a large number of elements that it alone reads."""
    own = _own_params(module)
    return sum(param.numel() for param in own) >= LARGE_LEFTOVER_NUMEL and public.isdisjoint(map(id, own))


def _own_params(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters(recurse=False))


def _check_root_params(root: nn.Module, root_params: Collection[nn.Parameter]) -> None:
    own = {id(param) for param in root.parameters()}
    for number, param in enumerate(root_params):
        if id(param) not in own:
            what = f"a tensor of shape {tuple(param.shape)}" if hasattr(param, "shape") else repr(param)
            raise ValueError(
                f"root_params[{number}] is {what}, not a parameter of this {type(root).__name__}; pass the Parameter "
                "objects of the model that is sharded."
            )


def _managed_params(root: nn.Module) -> list[ManagedParam]:
    """One entry per parameter object, in registration order."""
    found: dict[nn.Parameter, list[tuple[str, Place]]] = {}
    for prefix, module in root.named_modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            fqn = f"{prefix}.{name}" if prefix else name
            found.setdefault(param, []).append((fqn, Place(weakref.ref(module), name)))
    return [
        ManagedParam(param, tuple(fqn for fqn, _ in named), tuple(place for _, place in named))
        for param, named in found.items()
    ]


def _units_around(fqn: str, units: dict[str, UnitPlan]) -> list[str]:
    """Names of the units that contain the parameter `fqn`, innermost first."""
    owners = itertools.accumulate(fqn.split(".")[:-1], lambda prefix, name: f"{prefix}.{name}")
    return [name for name in reversed(["", *owners]) if name in units]
