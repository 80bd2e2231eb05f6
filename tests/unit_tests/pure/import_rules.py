"""Which source file may import or name what; `test_imports.py` applies it to the tree and to made-up sources.

Layers, lowest first: `FOLDERS`, with config.py beside plan/; files beside `__init__.py`; mcore/.
"""

import ast
from collections.abc import Iterator
from pathlib import PurePosixPath

PACKAGE = "megatron_fsdp"
FOLDERS = ("plan", "machine", "state", "runtime", "build", "dtensor", "diagnostics", "state_dict", "optim")
LAYER_OF_FOLDER = {folder: layer for layer, folder in enumerate(FOLDERS)}
SURFACE_LAYER = len(FOLDERS)
LAYER_OF_FOLDER["mcore"] = SURFACE_LAYER + 1
LAYER_OF_FILE = {
    "config.py": 0,
    "package_info.py": 0,
    "param_and_grad_buffer.py": LAYER_OF_FOLDER["diagnostics"],
    "uneven_dtensor.py": LAYER_OF_FOLDER["dtensor"],
}
STRATEGIES = {"no_shard", "optim", "optim_grads", "optim_grads_params"}
MAX_LINES = 800

#: Module -> where it may be imported from or named; a place is a file, or a folder ending in "/".
ONLY_IN = {
    "transformer_engine": ("state/codec_te.py",),
    "megatron.core": ("mcore/",),
    "megatron.training": (),
    "torch.cuda": ("machine/device.py", "machine/user_buffers.py"),
}
#: Module -> places that must do without it.
NOT_IN = {"torch.distributed": ("plan/", "config.py")}
STRATEGY_NAMES_ONLY_IN = ("plan/strategy.py", "config.py")
PRIVATE_TORCH_ONLY_IN = ("machine/torch_compat.py",)
#: The engine that megatron-core ships; ours must never be confused with it.
FORBIDDEN_EVERYWHERE = "megatron.core.distributed.fsdp"


def engine_violations(path: str, source: str) -> list[str]:
    """What the engine's file `path` (relative to the package, with slashes) does against the rules."""
    tree = ast.parse(source)
    found = [f"{path}: {len(source.splitlines())} lines, more than {MAX_LINES}"] if is_too_long(source) else []
    layer = layer_of(path)
    for line, name in names_used(tree, path):
        where = f"{path}:{line}: {name}"
        if is_within(name, PACKAGE) and (target := layer_of_module(name)) > layer:
            found.append(f"{where} is of layer {target}, above this file's layer {layer}")
        for module, places in ONLY_IN.items():
            if is_within(name, module) and not _is_in(path, places):
                found.append(f"{where}: {module} belongs in {' and '.join(places) or 'no file of the engine'}")
        for module, places in NOT_IN.items():
            if is_within(name, module) and _is_in(path, places):
                found.append(f"{where}: {module} does not belong in {' and '.join(places)}")
        if is_private_torch(name) and not _is_in(path, PRIVATE_TORCH_ONLY_IN):
            found.append(f"{where} is private to torch and belongs in {PRIVATE_TORCH_ONLY_IN[0]}")
    if not _is_in(path, STRATEGY_NAMES_ONLY_IN):
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and node.value in STRATEGIES:
                found.append(f"{path}:{node.lineno}: strategy name {node.value!r}; ask the plan instead")
    return found + shared_violations(path, source)


def shared_violations(path: str, source: str) -> list[str]:
    """What any file of the repository does against the rules for all of them."""
    return [
        f"{path}:{line}: {name} is megatron-core's own copy of an engine; import {PACKAGE}"
        for line, name in names_used(ast.parse(source), path)
        if is_within(name, FORBIDDEN_EVERYWHERE)
    ]


def is_too_long(source: str) -> bool:
    """Whether a file should become two."""
    return len(source.splitlines()) > MAX_LINES


def layer_of(path: str) -> int:
    """The layer of a file of the engine."""
    parts = PurePosixPath(path).parts
    return LAYER_OF_FILE.get(parts[0], SURFACE_LAYER) if len(parts) == 1 else LAYER_OF_FOLDER[parts[0]]


def layer_of_module(name: str) -> int:
    """The layer of a dotted name inside the engine."""
    parts = name.split(".")[1:]
    if not parts:
        return SURFACE_LAYER
    return LAYER_OF_FOLDER.get(parts[0], LAYER_OF_FILE.get(f"{parts[0]}.py", SURFACE_LAYER))


def is_within(name: str, module: str) -> bool:
    """Whether the dotted `name` is `module` or something inside it."""
    return name == module or name.startswith(module + ".")


def is_private_torch(name: str) -> bool:
    """Whether a dotted name inside torch passes through a component that starts with one underscore."""
    return is_within(name, "torch") and any(p.startswith("_") and not p.startswith("__") for p in name.split("."))


def names_used(tree: ast.Module, path: str) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything imported, and of every attribute reached through an import."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
                bound[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(node, path)
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"
                bound[alias.asname or alias.name] = f"{module}.{alias.name}"
        elif isinstance(node, ast.Call) and (name := _imported_by_call(node)) is not None:
            yield node.lineno, name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (dotted := _dotted(node)) is not None:
            first, _, rest = dotted.partition(".")
            if first in bound:
                yield node.lineno, f"{bound[first]}.{rest}"


def _absolute(node: ast.ImportFrom, path: str) -> str:
    if node.level == 0:
        return node.module or ""
    package = [PACKAGE, *PurePosixPath(path).parts[:-1]]
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, node.module] if node.module else base)


def _imported_by_call(node: ast.Call) -> str | None:
    """The module that `importlib.import_module("x")` or `__import__("x")` imports, if it is written out."""
    called = _dotted(node.func) or ""
    if called.split(".")[-1] not in ("import_module", "__import__") or not node.args:
        return None
    first = node.args[0]
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None


def _dotted(node: ast.expr) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *reversed(parts)])


def _is_in(path: str, places: tuple[str, ...]) -> bool:
    return any(path.startswith(place) if place.endswith("/") else path == place for place in places)
