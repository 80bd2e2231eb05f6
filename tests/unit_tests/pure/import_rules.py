"""Rules of what a source file may import or name; `test_imports.py` applies them to the trees and to made-up sources.

Layers of the engine, lowest first: `FOLDERS`, with config.py beside plan/; files beside `__init__.py`; mcore/. Of the
training loop: `ROOMS`. No module of either tree reaches itself by imports, wherever in a file they stand.
"""

import ast
import graphlib
from collections.abc import Iterator, Mapping, Sequence
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
STRATEGY_NAMES_ONLY_IN = ("plan/strategy.py",)
PRIVATE_TORCH_ONLY_IN = ("machine/torch_compat.py",)
#: Private names that no source defines and that do not count: a namespace, and namedtuple's.
NOT_COUNTED = {"_C", "_fields"}
#: Every private name of torch that the engine uses, by the last private part of its path. It shall become shorter.
PRIVATE_TORCH_NAMES = frozenset(
    {
        # autograd
        "_are_functorch_transforms_active", "_backward_hooks", "_base", "_current_autograd_node",
        "_current_graph_task_id", "_execution_engine", "_post_accumulate_grad_hooks", "_version",
        "_will_engine_execute_node",
        # batched operations
        "_foreach_add_", "_foreach_copy_", "_foreach_mul_", "_foreach_norm", "_foreach_zero_",
        # distributed
        "_get_backend", "_make_nccl_premul_sum", "_symmetric_memory", "_SymmetricMemory", "_world",
        # DTensor
        "_dtensor_spec", "_local_tensor", "_StridedShard",
        # modules and the compiler
        "_disable_dynamo", "_metadata", "_parameters",
    }
)  # fmt: skip
#: The engine that megatron-core ships; ours must never be confused with it.
FORBIDDEN_EVERYWHERE = "megatron.core.distributed.fsdp"

TRAINING = "megatron.training"
#: Rows of rooms (a file, or a folder ending in "/") of the training loop, lowest first: a room may import rooms of
#: lower rows, and none beside it. A file with a row of its own is no part of its folder.
ROOMS = (
    ("__init__.py", "checkpoint/__init__.py", "errors.py", "ranks.py", "tokenizer.py"),
    ("collective_errors.py", "config/"),
    ("checkpoint/format/", "data/", "files.py", "initialize.py", "optim.py"),
    ("checkpoint/load/args_from_checkpoint.py", "checkpoint/offline/"),
    ("job.py",),
    ("state.py",),
    ("checkpoint/run_state/", "model.py", "step.py", "stopping.py"),
    ("checkpoint/load/", "checkpoint/save/", "evaluate.py", "gpt.py"),
    ("callbacks.py",),
    ("loop.py", "reporting/"),
    ("build.py",),
    ("pretrain.py",),
    ("launch.py",),
)
ROW_OF_ROOM = {room: row for row, rooms in enumerate(ROOMS) for room in rooms}
#: As `ONLY_IN`, for the training loop.
TRAINING_ONLY_IN = {
    "megatron.core": (
        "checkpoint/load/lr_schedule.py", "checkpoint/run_state/rng_state.py", "config/to_core.py", "data/", "gpt.py",
        "initialize.py", "model.py", "optim.py", "state.py", "step.py", "tokenizer.py",
    ),
    "rich": ("reporting/progress.py",),
    "transformer_engine": (),
    "yaml": ("config/sources.py",),
}  # fmt: skip
#: Files that --help and a mistyped flag need, and which torch would make slow; kernels.py imports it in a function.
WITHOUT_TORCH = ("config/", "errors.py", "files.py", "launch.py", "ranks.py", "tokenizer.py")
WITH_TORCH = ("config/kernels.py", "config/to_core.py")
#: The entry point alone imports inside functions: it answers --help before torch and megatron-core are loaded.
IMPORTS_IN_FUNCTIONS_ONLY_IN = ("launch.py",)
TRAINING_PRIVATE_TORCH_ONLY_IN = ("checkpoint/format/torch_compat.py",)
TRAINING_STRATEGY_NAMES_ONLY_IN = ("config/schema_parallel.py",)


def engine_violations(path: str, source: str) -> list[str]:
    """Violations of the rules by the engine's file `path` (relative to the package, with slashes)."""
    tree = ast.parse(source)
    found = [f"{path}: {len(source.splitlines())} lines, more than {MAX_LINES}"] if is_too_long(source) else []
    layer = layer_of(path)
    for line, name in names_used(tree, (PACKAGE, *PurePosixPath(path).parts[:-1])):
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
        found += _strategy_names(path, tree)
    return found + shared_violations(path, source)


def training_violations(path: str, source: str) -> list[str]:
    """Violations of the rules by the training loop's file `path` (relative to the package, with slashes)."""
    room = room_of(path)
    if room is None:
        return [f"{path} has no place in ROOMS"]
    tree, found = ast.parse(source), []
    for line, name in names_used(tree, (*TRAINING.split("."), *PurePosixPath(path).parts[:-1])):
        where = f"{path}:{line}: {name}"
        target = room_of_module(name) if is_within(name, TRAINING) else None
        if target is not None and target != room and ROW_OF_ROOM[target] >= ROW_OF_ROOM[room]:
            found.append(f"{where} is of {target}, which is not below {room}")
        for module, places in TRAINING_ONLY_IN.items():
            if is_within(name, module) and not _is_in(path, places):
                found.append(f"{where}: {module} belongs in {' and '.join(places) or 'no file of the training loop'}")
        if is_within(name, "torch") and _is_in(path, WITHOUT_TORCH) and not _is_in(path, WITH_TORCH):
            found.append(f"{where}: torch would make --help slow")
        if is_private_torch(name) and not _is_in(path, TRAINING_PRIVATE_TORCH_ONLY_IN):
            found.append(f"{where} is private to torch and belongs in {TRAINING_PRIVATE_TORCH_ONLY_IN[0]}")
    if not _is_in(path, IMPORTS_IN_FUNCTIONS_ONLY_IN):
        found += [f"{path}:{line}: import inside a function" for line in _imports_in_functions(tree)]
    if not _is_in(path, TRAINING_STRATEGY_NAMES_ONLY_IN):
        found += _strategy_names(path, tree)
    return found + shared_violations(path, source)


def shared_violations(path: str, source: str) -> list[str]:
    """Violations of the rules for all files of the repository."""
    return [
        f"{path}:{line}: {name} is megatron-core's own copy of an engine; import {PACKAGE}"
        for line, name in names_used(ast.parse(source), (PACKAGE, *PurePosixPath(path).parts[:-1]))
        if is_within(name, FORBIDDEN_EVERYWHERE)
    ]


def import_graph(files: Mapping[str, str]) -> dict[str, set[str]]:
    """Module -> modules of `files` that it imports, also in functions and for annotations only.

    Args:
        files: path from the root of its source tree, with slashes -> source.
    """
    path_of = {".".join(PurePosixPath(path).with_suffix("").parts).removesuffix(".__init__"): path for path in files}

    def module_of(name: str) -> str:
        while name and name not in path_of:
            name = name.rpartition(".")[0]
        return name

    graph = {}
    for module, path in path_of.items():
        names = names_used(ast.parse(files[path]), PurePosixPath(path).parts[:-1])
        graph[module] = {module_of(name) for _, name in names} - {"", module}
    return graph


def import_circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Modules each of which is imported by the one before, the first again at the end; empty if there is no circle."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1][::-1]
    return []


def is_too_long(source: str) -> bool:
    """True if a file should become two."""
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


def room_of(path: str) -> str | None:
    """The room of the training loop that the file `path` belongs to; None if there is none."""
    return max((room for room in ROW_OF_ROOM if _is_in(path, (room,))), key=len, default=None)


def room_of_module(name: str) -> str | None:
    """The room of a dotted name inside the training loop; None for a folder of rooms."""
    parts = name.split(".")[len(TRAINING.split(".")) :]
    places = ("/".join(parts[:count]) + end for count in range(len(parts), 0, -1) for end in (".py", "/"))
    return next((place for place in places if place in ROW_OF_ROOM), None)


def is_within(name: str, module: str) -> bool:
    """True if the dotted `name` is `module` or something inside it."""
    return name == module or name.startswith(module + ".")


def is_private_torch(name: str) -> bool:
    """True if a dotted name inside torch passes through a component that starts with one underscore."""
    return is_within(name, "torch") and any(p.startswith("_") and not p.startswith("__") for p in name.split("."))


def private_torch_names(sources: dict[str, str]) -> set[str]:
    """Private names of torch in the engine's sources (by path): those that no source defines. mcore/ has Megatron's."""
    trees = [ast.parse(source) for path, source in sources.items() if not path.startswith("mcore/")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and _is_own_attribute(node)}
    paths = [node.attr for node in nodes if isinstance(node, ast.Attribute) and node.attr not in own]
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and is_within(node.module or "", "torch"):
            paths += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and (_dotted(node.func) or "").endswith("attrgetter"):
            paths += [arg.value for arg in node.args]
    private = (
        [part for part in path.split(".") if part.startswith("_") and not part.startswith("__")] for path in paths
    )
    return {parts[-1] for parts in private if parts} - NOT_COUNTED


def _is_own_attribute(node: ast.Attribute) -> bool:
    """Assigned to, on an object of ours."""
    return isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def names_used(tree: ast.Module, package: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of all imports in `package`, and of every attribute reached through them."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
                bound[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(node, package)
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


def _absolute(node: ast.ImportFrom, package: Sequence[str]) -> str:
    if node.level == 0:
        return node.module or ""
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, node.module] if node.module else base)


def _imports_in_functions(tree: ast.Module) -> Iterator[int]:
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from (node.lineno for node in ast.walk(function) if isinstance(node, (ast.Import, ast.ImportFrom)))


def _strategy_names(path: str, tree: ast.Module) -> list[str]:
    return [
        f"{path}:{node.lineno}: strategy name {node.value!r}; ask the plan instead"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in STRATEGIES
    ]


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
