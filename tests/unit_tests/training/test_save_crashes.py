"""Whenever a save is killed or the power fails, loading gives the checkpoint before it or the new one, to the bit."""

import contextlib
import errno
import os
import pickle
import resource
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemReader

from megatron.training.checkpoint.format.filesystem import Disk, FileDigest
from megatron.training.checkpoint.format.integrity import checksum_errors, find_damage, manifest_bytes
from megatron.training.checkpoint.format.paths import TRACKER, all_hidden, folder_to_load, read_tracker
from megatron.training.checkpoint.save.publish import begin, publish, retain
from megatron.training.checkpoint.save.storage_writer import CheckpointWriter, with_storage_data
from tests.unit_tests.harness.crashing_disk import CrashingDisk

EVERY_POINT = os.environ.get("MEGATRON_TRAINING_EVERY_CRASH") == "1"
"""All of them, nearly 400; otherwise a few of each kind."""

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def values_of(iteration: int) -> dict:
    generator = torch.Generator().manual_seed(iteration)
    return {"weight": torch.randn(3, 4, generator=generator), "step": iteration}


def save(disk: Disk, root: Path, iteration: int, content: int | None = None) -> None:
    """Saves as `Saver` does, without ranks: the content is that of iteration `content`."""
    partial = begin(disk, root, iteration)
    try:
        values = values_of(iteration if content is None else content)
        writer = CheckpointWriter(partial.folder, disk)
        dcp.save(values, storage_writer=writer, no_dist=True)
        metadata = pickle.dumps(with_storage_data(writer, writer.metadata, [writer.written]))
        publish(disk, partial, writer.written.files, {".metadata": metadata, "run_config.yaml": b"a: 1\n"})
        retain(disk, root, 10, iteration)
    finally:
        partial.release()  # As the end of a process does.


def save_until_crash(write: Callable[[Disk, Path], None], disk: CrashingDisk, root: Path) -> None:
    """torch wraps what a write raises, so that the disk must tell what it was."""
    with pytest.raises(BaseException):
        write(disk, root)
    assert disk.has_crashed


def load(root: Path) -> int | None:
    """The iteration whose content loading gives; None if there is no checkpoint. Fails if it is damaged."""
    folder = folder_to_load(root, None)
    if folder is None:
        return None
    assert checksum_errors(folder, 0, 1) == []
    values = {"weight": torch.zeros(3, 4), "step": -1}
    dcp.load(values, storage_reader=FileSystemReader(str(folder)), no_dist=True)
    assert values["weight"].equal(values_of(values["step"])["weight"])
    return values["step"]


def first(disk: Disk, root: Path) -> None:
    save(disk, root, 10)


def next_one(disk: Disk, root: Path) -> None:
    save(disk, root, 15)


def over_the_latest(disk: Disk, root: Path) -> None:
    save(disk, root, 12, content=99)


BEFORE = {"nothing": (), "two": (10, 12)}
CASES = [
    (first, "nothing", {None, 10}),
    (next_one, "two", {12, 15}),
    (over_the_latest, "two", {12, 99}),
]


@pytest.mark.parametrize("loses_power", [False, True], ids=["kill", "power"])
@pytest.mark.parametrize("write, there, allowed", CASES, ids=[case[0].__name__ for case in CASES])
def test_a_crash_leaves_the_old_or_the_new_checkpoint(tmp_path, write, there, allowed, loses_power):
    template = tmp_path / "template"
    template.mkdir()
    for iteration in BEFORE[there]:
        save(Disk(), template, iteration)
    whole = CrashingDisk()
    write(whole, shutil.copytree(template, tmp_path / "whole"))
    seen = set()
    for point in points(whole.operations, offset=loses_power):
        root = Path(shutil.copytree(template, tmp_path / "crashed"))
        save_until_crash(write, CrashingDisk(crash_at=point, loses_power=loses_power), root)
        seen.add(load(root))
        nothing_half_done_is_seen(root)
        save(CrashingDisk(), root, 20)
        assert load(root) == 20 and not list(all_hidden(root)), "the next save clears up"
        shutil.rmtree(root)
    assert seen <= allowed
    if EVERY_POINT:
        assert seen == allowed


def points(operations: list[str], offset: int) -> list[int]:
    """Before which operations to crash."""
    if EVERY_POINT:
        return list(range(len(operations)))
    writes = [at for at, name in enumerate(operations) if name == "write"]
    others = [at for at, name in enumerate(operations) if name != "write"]
    return [*writes[offset::20], *others[offset::3]]


def nothing_half_done_is_seen(root: Path) -> None:
    for folder in root.glob("iter_*"):
        assert find_damage(folder) is None and checksum_errors(folder, 0, 1) == []
    with contextlib.suppress(FileNotFoundError):
        assert read_tracker(root) is None or isinstance(read_tracker(root), int)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    for iteration in (10, 20):
        save(CrashingDisk(), root, iteration)
    return root


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "run_config.yaml"])
@pytest.mark.parametrize(
    "harm, told", [(truncate, "{} has "), (Path.unlink, "{} is missing"), (flip_a_bit, "{} is not what was written")]
)
def test_a_damaged_file_is_named(saved, tmp_path, name, harm, told):
    root = Path(shutil.copytree(saved, tmp_path / "copy"))
    folder = root / "iter_0000020"
    harm(folder / name)
    problems = find_damage(folder) or ", ".join(checksum_errors(folder, 0, 1))
    assert problems.startswith(told.format(name))
    if harm is not flip_a_bit:
        with pytest.raises(ValueError, match="complete besides: iter_0000010"):
            folder_to_load(root, None)


def test_a_damaged_manifest_is_named_and_foreign_files_too(saved, tmp_path):
    folder = Path(shutil.copytree(saved / "iter_0000010", tmp_path / "iter_0000010"))
    (folder / "__9_0.distcp").write_bytes(b"")
    (folder / ".nfs0001").write_bytes(b"")
    assert find_damage(folder) == "__9_0.distcp does not belong to it"
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"bytes": ', '"bytes": 1', 1))
    assert find_damage(folder) == "manifest.json was changed after it was written"
    (folder / "manifest.json").write_text(text[:50])
    assert find_damage(folder).startswith("manifest.json cannot be read")


@pytest.mark.parametrize("name", ["/dev/zero", "../iter_0000020/.metadata", ".."])
def test_a_manifest_names_no_file_elsewhere(tmp_path, name):
    """Reading the first for its checksum would never end."""
    (tmp_path / "manifest.json").write_bytes(manifest_bytes({name: FileDigest(nbytes=0, checksum="")}))
    assert find_damage(tmp_path) == f"manifest.json names the file {name!r}, which is not in the checkpoint"


def test_a_file_that_the_system_cuts_off_is_told_in_its_words(tmp_path):
    """torch covers its error up with one about positions in the file."""
    values = {f"weight{number}": torch.randn(500) for number in range(5)}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4777, before[1]))
    try:
        with pytest.raises(CheckpointException) as caught:
            dcp.save(values, storage_writer=CheckpointWriter(tmp_path, Disk()), no_dist=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.failures[0][0].errno == errno.EFBIG


def test_a_partial_checkpoint_of_a_living_run_is_left_alone(tmp_path):
    living = begin(Disk(), tmp_path, 5)
    save(CrashingDisk(), tmp_path, 10)
    assert living.folder.exists(), "it is locked"
    living.release()
    save(CrashingDisk(), tmp_path, 20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000010", "iter_0000020", TRACKER]


class Meanwhile(CrashingDisk):
    """Another run saves to the same folder while this one publishes: before each of its renames."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root, self.others = root, []
        self.pool = ThreadPoolExecutor(8)

    def rename(self, source, target):
        self.others.append(self.pool.submit(publish_only, self.root))
        wait(self.others[-1:], timeout=0.05)  # It waits, if it is made to.
        super().rename(source, target)


def publish_only(root: Path) -> None:
    partial = begin(Disk(), root, 10)
    publish(Disk(), partial, {}, {"run_config.yaml": b"another: 1\n"})
    partial.release()


def test_two_runs_that_save_to_one_folder_do_not_meet(tmp_path):
    save(Disk(), tmp_path, 10)
    disk = Meanwhile(tmp_path)
    save(disk, tmp_path, 10)
    for other in disk.others:
        other.result()
    assert len(disk.others) == 4 and not list(all_hidden(tmp_path))
    assert read_tracker(tmp_path) == 10 and folder_to_load(tmp_path, None) == tmp_path / "iter_0000010"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000010", TRACKER]


class Undeletable(CrashingDisk):
    """Somebody else's files."""

    def delete_file(self, path):
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))


def test_a_file_or_a_link_in_the_place_of_a_checkpoint_is_replaced(tmp_path):
    root, elsewhere = tmp_path / "root", tmp_path / "iter_0000030"
    save(Disk(), tmp_path, 30)
    root.mkdir()
    (root / "iter_0000010").write_text("a file")
    (root / "iter_0000020").symlink_to(elsewhere)
    save(Disk(), root, 10)
    save(Disk(), root, 20)
    assert sorted(path.name for path in root.iterdir()) == ["iter_0000010", "iter_0000020", TRACKER]
    assert load(root) == 20 and find_damage(elsewhere) is None, "what the link led to is not ours to delete"


def test_what_cannot_be_deleted_stops_no_save(tmp_path):
    for iteration in (10, 12, 12, 20):
        save(Undeletable(), tmp_path, iteration)
    assert load(tmp_path) == 20 and [hidden.kind for hidden in all_hidden(tmp_path)] == ["deleted"] * 2
    save(CrashingDisk(), tmp_path, 30)
    assert not list(all_hidden(tmp_path))


class AlreadyDeleted(CrashingDisk):
    """Another run deletes at the same time, and is faster."""

    def delete_file(self, path):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))


def test_what_another_run_deletes_is_no_news(tmp_path, caplog):
    for iteration in (10, 10, 12):
        save(AlreadyDeleted(), tmp_path, iteration)
    assert load(tmp_path) == 12 and "cannot be deleted" not in caplog.text
