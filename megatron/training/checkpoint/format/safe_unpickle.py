"""Reading a checkpoint's pickles as data: nothing that a file names is imported, called or looked up but what is here.

torch's distributed checkpoint keeps its index in a pickle (`.metadata`), Megatron-LM the arguments of a run (`args`).
Everything else in a checkpoint is read by torch's own reader of plain data (`weights_only=True`).
"""

import argparse
import io
import pathlib
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import torch
import torch.distributed.checkpoint.filesystem as dcp_files
import torch.distributed.checkpoint.metadata as dcp_metadata

from megatron.training.checkpoint.format.torch_compat import StorageInfo


def _path(*parts: str) -> str:
    return str(pathlib.PurePosixPath(*map(str, parts)))


def _layout(name: str) -> torch.layout:
    return {"torch.strided": torch.strided}[name]


_HARMLESS: dict[tuple[str, str], object] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _layout,
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    **{
        (module, name): _path
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath")
    },
}
"""Names that both kinds of pickle may use; paths become text, since one of another system cannot be made."""

_OF_METADATA: dict[tuple[str, str], object] = {
    **{
        (dcp_metadata.__name__, name): getattr(dcp_metadata, name)
        for name in (
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
            "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        )
    },
    (dcp_files.__name__, "_StorageInfo"): StorageInfo,
}  # fmt: skip


class _Allowed(pickle.Unpickler):
    """Makes objects of the allowed kinds only."""

    def __init__(self, stream: io.BufferedIOBase, allowed: Mapping[tuple[str, str], object]):
        super().__init__(stream)
        self._allowed = {**_HARMLESS, **allowed}

    def find_class(self, module: str, name: str) -> Any:
        """The allowed object that `module.name` stands for. UnpicklingError for a name that is not on the list."""
        found = self._allowed.get((module, name))
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        return self.unknown(module, name) if found is None else found

    def unknown(self, module: str, name: str) -> Any:
        """Raises UnpicklingError."""
        raise pickle.UnpicklingError(f"it names {module}.{name}, which the index of a checkpoint has no use for")


class Opaque:
    """A value of a class that stays unknown: the arguments that made it, and none of its code."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "Opaque":
        made = super().__new__(cls)
        made.args = args
        return made

    def _ignore(self, *args: Any, **kwargs: Any) -> None:
        """Takes no notice: the value is of no known kind."""

    __init__ = __setstate__ = __setitem__ = append = extend = _ignore


class _Arguments(_Allowed):
    def unknown(self, module: str, name: str) -> Any:
        return Opaque

    def persistent_load(self, pid: Any) -> Opaque:
        return Opaque(pid)


def load_index(stream: BinaryIO) -> Any:
    """The object in the pickle of a checkpoint's index. Raises UnpicklingError for names that it has no use for."""
    return _Allowed(stream, _OF_METADATA).load()


def plain_arguments(saved: bytes) -> dict[str, Any]:
    """The plain values of an `argparse.Namespace` that was saved by `torch.save`. ValueError if it is something else.

    An enumeration's member becomes its value, other objects are left out.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(saved)) as archive:
            pickled = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            allowed = {("argparse", "Namespace"): argparse.Namespace}
            made = _Arguments(io.BytesIO(archive.read(pickled)), allowed).load()
    except Exception as error:  # noqa: BLE001  (damaged bytes can raise anything)
        raise ValueError(f"args cannot be read ({error!r})") from error
    if not isinstance(made, argparse.Namespace):
        raise ValueError(f"args is no argparse.Namespace but {type(made).__name__}")
    plain = {name: _plain(value) for name, value in vars(made).items()}
    return {name: value for name, value in plain.items() if not isinstance(value, Opaque)}


_KEEP: tuple[type, ...] = (bool, int, float, str, type(None), torch.dtype)


def _plain(value: Any) -> Any:
    if isinstance(value, _KEEP):
        return value
    if isinstance(value, (list, tuple)):
        return _all_plain(value, lambda items: type(value)(items))
    if isinstance(value, dict):
        return _all_plain(value.values(), lambda items: dict(zip(value, items, strict=True)))
    if isinstance(value, Opaque) and len(value.args) == 1 and isinstance(value.args[0], _KEEP):
        return value.args[0]
    return value if isinstance(value, Opaque) else Opaque()


def _all_plain(values: Any, build: Callable[[list], Any]) -> Any:
    items = [_plain(value) for value in values]
    return Opaque() if any(isinstance(item, Opaque) for item in items) else build(items)
