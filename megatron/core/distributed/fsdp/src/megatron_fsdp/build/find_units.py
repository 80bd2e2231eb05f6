"""Discovery of units, and of the unit that owns each parameter."""

from __future__ import annotations

import dataclasses
import pkgutil
import weakref
from collections.abc import Collection, Iterable, Sequence

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
    params: list[ManagedParam]
    is_root: bool


def resolve_unit_classes(
    unit_modules: Sequence[type | str] | None, option: str = "fsdp_unit_modules"
) -> tuple[type, ...]:
    """The module classes that `option` lists, with import paths resolved.

    Raises:
        ImportError: a path does not lead to anything.
        TypeError: an entry is neither a module class nor a path to one.
    """
    if isinstance(unit_modules, (str, type)):
        raise TypeError(f"{option} is {unit_modules!r}; expected a list of such, even if it holds only one.")
    classes = []
    for entry in unit_modules or ():
        found = _import(entry, option) if isinstance(entry, str) else entry
        if not (isinstance(found, type) and issubclass(found, nn.Module)):
            raise TypeError(f"{option} holds {entry!r}; expected torch.nn.Module classes or import paths of such.")
        classes.append(found)
    return tuple(classes)


def _import(path: str, option: str) -> object:
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ImportError(
            f"{option} holds {path!r}, which cannot be imported ({error}); "
            "give the full dotted path of a module class, or the class itself."
        ) from error


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
        ValueError: `classes` match no module of `root`, or `root_params` are not its parameters.
    """
    _check_root_params(root, root_params)
    names = {module: name for name, module in root.named_modules()}
    unit_modules = [module for module in names if isinstance(module, classes)] if classes else []
    if classes and not unit_modules:
        wanted = ", ".join(cls.__name__ for cls in classes)
        present = ", ".join(sorted({type(module).__name__ for module in names}))
        raise ValueError(f"no module of {type(root).__name__} is a {wanted}; classes present are: {present}.")
    # What is whole on every rank is never gathered: its parameters join the unit around it, without hooks of their own.
    unit_modules = [module for module in unit_modules if not all(map(is_no_shard, module.parameters()))]
    if classes:
        unit_modules += _large_leftovers(root, unit_modules, {id(param) for param in root_params})
    unit_modules += _param_owners(unit_modules if classes else [root], fine_grained)
    without_forward = _read_by_parents(root)
    unit_modules = [module for module in unit_modules if module not in without_forward]
    chosen = {root, *unit_modules}
    plans = {module: UnitPlan(names[module], module, [], module is root) for module in names if module in chosen}
    for param in _managed_params(root):
        owner = root if any(param.unsharded is other for other in root_params) else _owner(param, plans, names, root)
        plans[owner].params.append(param)
    return [plan for plan in plans.values() if plan.params or plan.is_root]


def _param_owners(units: list[nn.Module], classes: tuple[type, ...]) -> list[nn.Module]:
    """Modules below instances of `classes` in `units`, these included, that directly own a parameter to be gathered."""
    cut = [part for unit in units for part in unit.modules() if isinstance(part, classes)]
    owners = dict.fromkeys(module for part in cut for module in part.modules() if module not in units)
    return [module for module in owners if _is_run(module) and not all(map(is_no_shard, _own_params(module)))]


def _is_run(module: nn.Module) -> bool:
    """`module` has a forward, so that hooks can say when it computes; containers of parameters have none."""
    return type(module).forward is not nn.Module.forward


def _own_params(module: nn.Module) -> list[nn.Parameter]:
    return [param for param in module._parameters.values() if param is not None]


def _check_root_params(root: nn.Module, root_params: Collection[nn.Parameter]) -> None:
    own = {id(param) for param in root.parameters()}
    for number, param in enumerate(root_params):
        if id(param) not in own:
            what = f"a tensor of shape {tuple(param.shape)}" if hasattr(param, "shape") else repr(param)
            raise ValueError(
                f"root_params[{number}] is {what}, not a parameter of this {type(root).__name__}; pass the Parameter "
                "objects of the model that is sharded."
            )


def _read_by_parents(root: nn.Module) -> set[nn.Module]:
    """Modules whose forward is never called: their parent computes with their parameters itself."""
    return {module.out_proj for module in root.modules() if isinstance(module, nn.MultiheadAttention)}


def _large_leftovers(root: nn.Module, units: list[nn.Module], excluded: set[int]) -> list[nn.Module]:
    """Modules outside `units` that directly own a large parameter which no other module shares."""
    inside = {module for unit in units for module in unit.modules()}
    holders: dict[int, int] = {}
    for module in root.modules():
        for param in _own_params(module):
            holders[id(param)] = holders.get(id(param), 0) + 1
    found = []
    for module in root.modules():
        own = _own_params(module)
        if all(map(is_no_shard, own)) or not _is_run(module):
            continue
        is_private = all(holders[id(param)] == 1 and id(param) not in excluded for param in own)
        is_large = sum(param.numel() for param in own) >= LARGE_LEFTOVER_NUMEL
        if module is not root and module not in inside and is_private and is_large:
            found.append(module)
    return found


def _managed_params(root: nn.Module) -> Iterable[ManagedParam]:
    """One entry per parameter object, in registration order."""
    found: dict[int, tuple[nn.Parameter, list[str], list[Place]]] = {}
    for module_name, module in root.named_modules():
        for name, param in module._parameters.items():
            if param is None:
                continue
            _, fqns, places = found.setdefault(id(param), (param, [], []))
            fqns.append(f"{module_name}.{name}" if module_name else name)
            places.append(Place(weakref.ref(module), name))
    return [ManagedParam(param, tuple(fqns), tuple(places)) for param, fqns, places in found.values()]


def _owner(
    param: ManagedParam, plans: dict[nn.Module, UnitPlan], names: dict[nn.Module, str], root: nn.Module
) -> nn.Module:
    """The innermost unit module above every module that holds `param`."""
    units_by_name = {plan.fqn: module for module, plan in plans.items()}
    chains = [_chain(fqn.rpartition(".")[0], units_by_name) for fqn in param.fqns]
    common = [name for name in chains[0] if all(name in chain for chain in chains[1:])]
    return units_by_name[common[0]] if common else root


def _chain(module_name: str, units_by_name: dict[str, nn.Module]) -> list[str]:
    """Names of the units that contain `module_name`, innermost first."""
    chain = []
    while True:
        if module_name in units_by_name:
            chain.append(module_name)
        if not module_name:
            return chain
        module_name = module_name.rpartition(".")[0]
