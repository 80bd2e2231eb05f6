"""A disk on which a program can be killed, or lose power, before any operation, and what it then leaves."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from megatron.training.checkpoint.format.filesystem import Disk


class Crash(BaseException):
    """The end of a program that was killed. Nothing but a test may catch it."""


@dataclass
class CrashingDisk(Disk):
    """Counts operations, and raises `Crash` in place of number `crash_at`, half of which may have happened.

    Nothing is really synchronized; with `loses_power`, what was not is undone: contents of files that were not synced,
    and names that changed in a folder since it was. (Later changes are lost before earlier ones, as journals do.)
    """

    crash_at: int | None = None
    loses_power: bool = False
    operations: list[str] = field(default_factory=list)
    has_crashed: bool = False
    _unsynced_files: dict[str, int] = field(default_factory=dict)
    """Descriptors of their own by the names that the files had; they may have been renamed."""
    _unsynced_renames: list[tuple] = field(default_factory=list)

    def make_folder(self, path):
        self._operation("make_folder", path)
        super().make_folder(path)

    def create(self, path):
        self._operation("create", path)
        stream = path.open("wb", buffering=0)
        self._unsynced_files[stream.name] = os.dup(stream.fileno())
        return stream

    def write(self, stream, data):
        self._operation("write", Path(stream.name), half=lambda: stream.write(data[: len(data) // 2]))
        stream.write(data)

    def sync(self, stream):
        self._operation("sync", Path(stream.name))
        os.close(self._unsynced_files.pop(stream.name))

    def sync_folder(self, path):
        self._operation("sync_folder", path)
        self._unsynced_renames = [pair for pair in self._unsynced_renames if pair[1].parent != path]

    def rename(self, source, target):
        self._operation("rename", source)
        overwritten = target.read_bytes() if target.is_file() else None
        super().rename(source, target)
        if overwritten is None:
            self._unsynced_renames.append((source, target))
        else:
            self._unsynced_renames.append((source, target, overwritten))

    def delete_file(self, path):
        self._operation("delete_file", path)
        super().delete_file(path)

    def delete_folder(self, path):
        self._operation("delete_folder", path)
        super().delete_folder(path)

    def _operation(self, name, path, half=None):
        if self.has_crashed:
            raise Crash("it has been killed before")
        if self.crash_at == len(self.operations):
            self.has_crashed = True
            if half is not None:
                half()
            if self.loses_power:
                self._lose_power()
            raise Crash(f"{name} {path.name}")
        self.operations.append(name)

    def _lose_power(self):
        for descriptor in self._unsynced_files.values():
            os.truncate(descriptor, 0)
            os.close(descriptor)
        for source, target, *overwritten in reversed(self._unsynced_renames):
            if target.exists():
                os.replace(target, source)
            for content in overwritten:
                target.write_bytes(content)
