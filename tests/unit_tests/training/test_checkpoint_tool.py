"""`tools/checkpoint.py` on checkpoints that are written here by torch alone."""

import argparse
import contextlib
import errno
import importlib.util
import json
import os
import pickle
import resource
import sys
import weakref
import zipfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron.training.checkpoint.offline.lazy_reader import Entry, open_source
from megatron.training.checkpoint.offline.writer import write_file, write_folder

FC1 = "decoder.layers.0.mlp.linear_fc1.weight"
ROOT = Path(__file__).parents[3]


def _load_tool():
    spec = importlib.util.spec_from_file_location("checkpoint_tool", ROOT / "tools" / "checkpoint.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


TOOL = _load_tool()


def stored(wrappers: str = "") -> dict:
    """Values that a run might have written."""
    torch.manual_seed(0)
    state = f"optimizer.state.{wrappers}"
    moments = {f"{state}{FC1}{end}.exp_avg": torch.randn(3, 4) for end in ("_w", "_v")}
    steps = {f"{state}{FC1}{end}.step": torch.tensor(7.0) for end in ("_w", "_v")}
    return {
        f"model.module.{FC1}_w": torch.randn(3, 4),
        f"model.module.{FC1}_v": torch.randn(3, 4),
        "model.module.half": torch.randn(5).bfloat16(),
        "model.module.empty": torch.empty(0, 2),
        **moments,
        **steps,
        f"optimizer.param_to_group_meta.{wrappers}{FC1}.betas": [0.9, 0.95],
        "progress.consumed_train_samples": 24,
        "rng_state.rank_00000.torch_rng_state": torch.arange(3, dtype=torch.uint8),
        "iteration": 3,
        "args": argparse.Namespace(hidden_size=4, bf16=True, padded_vocab_size=None),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a checkpoint and the file that names it."""
    root = tmp_path_factory.mktemp("checkpoints")
    dcp.save(stored(), checkpoint_id=str(root / "iter_0000003"), no_dist=True)
    (root / "latest_checkpointed_iteration.txt").write_text("3")
    return root


def values(path: Path) -> dict:
    """Everything in a checkpoint, read."""
    return {name: value.read() if hasattr(value, "read") else value for name, value in open_source(path).items()}


def same(one: dict, other: dict) -> bool:
    def equal(a, b):
        return a.dtype == b.dtype and a.shape == b.shape and a.equal(b) if isinstance(a, torch.Tensor) else a == b

    return one.keys() == other.keys() and all(equal(value, other[name]) for name, value in one.items())


def test_inspect_lists_all(folder, capsys):
    assert TOOL.main(["inspect", str(folder), "--values"]) == 0
    shown = capsys.readouterr().out
    assert f"model.module.{FC1}_w  (3, 4)  float32\n" in shown and "model.module.half  (5,)  bfloat16" in shown
    assert "args.hidden_size = 4" in shown and "iteration 3: 9 tensors" in shown and "29 elements in the model" in shown
    assert TOOL.main(["inspect", str(folder / "iter_0000003"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tensors"]["model.module.half"] == {"shape": [5], "dtype": "bfloat16"}
    assert report["iteration"] == 3 and report["arguments"]["bf16"] is True


def test_one_file_is_plain_torch_and_back_it_is_the_same_bit_for_bit(folder, tmp_path):
    file, back = tmp_path / "model.pt", tmp_path / "back"
    assert TOOL.main(["convert", str(folder), str(file), "--to", "torch"]) == 0
    plain = torch.load(file, weights_only=True)
    before = stored()
    halves = [before[f"model.module.{FC1}{end}"] for end in ("_w", "_v")]
    assert plain["model"].keys() == {FC1, "half", "empty"} and plain["model"][FC1].equal(torch.cat(halves))
    assert plain["optimizer"]["state"][FC1].keys() == {"exp_avg", "step"} and plain["args"]["hidden_size"] == 4
    assert zipfile.ZipFile(file).testzip() is None, "other programs check the sums"
    assert TOOL.main(["convert", str(file), str(back), "--to", "fsdp_dtensor"]) == 0
    assert (back / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert same(values(back), values(folder))
    assert (back / "iter_0000003" / "manifest.json").exists() and TOOL.main(["verify", str(back)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "model.pt"]


def test_torch_alone_reads_it(folder):
    text = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    (example,) = (block for block in text.split("```")[1::2] if "no_dist=True" in block)
    names = {}
    exec(example.removeprefix("python").replace("checkpoints/iter_0000100", str(folder / "iter_0000003")), names)
    assert same(names["weights"], {name: value for name, value in stored().items() if name.startswith("model.")})


def test_megatron_lm_finds_its_names(folder, tmp_path):
    assert TOOL.main(["convert", str(folder), str(tmp_path / "theirs"), "--to", "megatron-lm"]) == 0
    theirs = values(tmp_path / "theirs")
    state = "optimizer.state.module.module.module."
    assert {f"{state}{FC1}_w.exp_avg", f"model.module.{FC1}_v", "args", "checkpoint_version", "iteration"} <= set(
        theirs
    )
    assert f"optimizer.param_to_group_meta.module.module.module.{FC1}.betas" in theirs
    assert not any(name.startswith(("progress.", "rng_state.")) for name in theirs)
    assert TOOL.main(["diff", str(folder), str(tmp_path / "theirs"), "--only", "optimizer."]) == 0


def test_fused_weights_are_whole_in_one_file_and_for_megatron_lm(tmp_path):
    """For Megatron-LM, which does not take them apart, as its tensor-parallel ranks have them."""
    name, ends = "decoder.layers.0.mixer.in_proj.weight", {"z": 4, "x": 4, "B": 2, "C": 2, "dt": 2}
    conv = "decoder.layers.1.self_attention.conv1d.bias"
    parts = {f"{name}.{end}": torch.randn(rows, 3) for end, rows in ends.items()}
    parts |= {f"{conv}.{end}": torch.randn(2) for end in ("value", "query", "key")}
    ours = {
        **{f"model.module.{part}": value for part, value in parts.items()},
        **{f"optimizer.state.{part}.exp_avg": 2 * value for part, value in parts.items()},
        **{f"optimizer.state.{part}.step": torch.tensor(7.0) for part in parts},
        f"optimizer.param_to_group_meta.{name}.lr": 0.5,
        "args": argparse.Namespace(tensor_model_parallel_size=2),
    }
    names = [tmp_path / "ours", tmp_path / "one.pt", tmp_path / "back", tmp_path / "theirs"]
    write_folder({**ours, "iteration": 3}, names[0])
    for source, target, form in ((0, 1, "torch"), (1, 2, "fsdp_dtensor"), (1, 3, "megatron-lm")):
        assert TOOL.main(["convert", str(names[source]), str(names[target]), "--to", form]) == 0
    plain = torch.load(names[1], weights_only=True)
    whole = torch.cat([parts[f"{name}.{end}"] for end in ends])
    assert plain["model"].keys() == {name, conv} and plain["model"][name].equal(whole)
    assert plain["model"][conv].equal(torch.cat([parts[f"{conv}.{end}"] for end in ("query", "key", "value")]))
    assert same(values(names[2]), values(names[0]))
    theirs = values(names[3])
    by_rank = torch.cat([parts[f"{name}.{end}"].chunk(2)[rank] for rank in (0, 1) for end in ends])
    state = f"optimizer.state.module.module.{name}"
    assert theirs[f"model.module.{name}"].equal(by_rank) and theirs[f"{state}.exp_avg"].equal(2 * by_rank)
    assert theirs[f"{state}.step"] == 7 and not any(part in key for key in theirs for part in parts)
    assert theirs[f"optimizer.param_to_group_meta.module.module.{name}.lr"] == 0.5
    del ours[f"model.module.{name}.C"]
    write_folder({**ours, "iteration": 3}, tmp_path / "lacking")
    assert TOOL.main(["convert", str(tmp_path / "lacking"), str(tmp_path / "new.pt"), "--to", "torch"]) == 2


def test_errors_name_the_tools_own_flag(tmp_path, capsys):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    assert TOOL.main(["verify", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "iter_0000007 does not exist; complete there: none, which --step chooses" in said


def test_a_bare_state_dict_becomes_a_checkpoint_of_weights(tmp_path):
    weights = {FC1: torch.randn(6, 4), "norm": torch.ones(4)}
    torch.save(weights, tmp_path / "bare.pt")
    assert (
        TOOL.main(["convert", str(tmp_path / "bare.pt"), str(tmp_path / "out"), "--to", "fsdp_dtensor", "--swiglu"])
        == 0
    )
    found = values(tmp_path / "out")
    assert set(found) == {f"model.module.{FC1}_w", f"model.module.{FC1}_v", "model.module.norm"}
    assert found[f"model.module.{FC1}_v"].equal(weights[FC1][3:])
    assert TOOL.main(["diff", str(tmp_path / "bare.pt"), str(tmp_path / "out"), "--only", "model."]) == 0


def test_what_plain_torch_saves_of_a_run_becomes_a_checkpoint(tmp_path, capsys):
    """Its optimizers number parameters, and a list may hold tensors, also of a dtype that promotes to no other."""
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    extra = [torch.ones(2, dtype=torch.float8_e4m3fn), {"deep": torch.zeros(2)}]
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "extra": extra}, tmp_path / "one.pt")
    extra[0] = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "extra": extra}, tmp_path / "two.pt")
    assert TOOL.main(["convert", str(tmp_path / "one.pt"), str(tmp_path / "new"), "--to", "fsdp_dtensor"]) == 0
    assert values(tmp_path / "new").keys() >= {"optimizer.state.0.exp_avg", "extra.0", "extra.1.deep"}
    assert TOOL.main(["diff", str(tmp_path / "one.pt"), str(tmp_path / "new")]) == 0
    capsys.readouterr()
    assert TOOL.main(["diff", str(tmp_path / "one.pt"), str(tmp_path / "two.pt")]) == 1
    assert "extra.0: 1 of 2 elements differ, by up to 1\n" in capsys.readouterr().out


def test_diff_tells_names_shapes_and_the_largest_difference(tmp_path, capsys):
    one = {"a": torch.zeros(4), "b": torch.zeros(2), "nan": torch.tensor([float("nan")]), "only": torch.ones(1)}
    other = {"a": torch.tensor([0.0, 0.0, 0.25, -0.5]), "b": torch.zeros(3), "nan": one["nan"].clone()}
    torch.save(one, tmp_path / "one")
    torch.save(other, tmp_path / "other")
    both = [str(tmp_path / "one"), str(tmp_path / "other")]
    assert TOOL.main(["diff", *both]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "only in the first: model.only",
        "model.a: 2 of 4 elements differ, by up to 0.5",
        "model.b: shapes (2,) and (3,)",
    ]
    assert "nan" not in "".join(lines[:-1])
    assert TOOL.main(["diff", *both, "--only", "model.a", "--atol", "0.4"]) == 1
    assert TOOL.main(["diff", *both, "--only", "model.a", "--atol", "0.5"]) == 0


def test_verify_reads_every_tensor(folder, tmp_path, capsys):
    assert TOOL.main(["verify", str(folder)]) == 0
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in (folder / "iter_0000003").iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    (data,) = copy.glob("*.distcp")
    whole = data.read_bytes()
    data.write_bytes(whole[:-1000] + b"\0" * 1000)
    assert TOOL.main(["verify", str(copy)]) == 2
    data.write_bytes(whole[:-1000])
    assert TOOL.main(["verify", str(copy)]) == 2
    assert f"{data.name} has {len(whole) - 1000} of {len(whole)} bytes" in capsys.readouterr().err


def flipped(path: Path, at: bytes) -> None:
    """Changes a byte inside of `at`, which the file holds once."""
    data = path.read_bytes()
    assert data.count(at) == 1
    path.write_bytes(data.replace(at, bytes([at[0] ^ 1]) + at[1:]))


def test_what_was_damaged_is_neither_whole_nor_converted(folder, tmp_path, capsys):
    """Sizes are as they were, torch reads it, and without a look at checksums the copy would have good ones."""
    weights = stored()[f"model.module.{FC1}_w"].numpy().tobytes()
    file, back = tmp_path / "model.pt", tmp_path / "back"
    assert TOOL.main(["convert", str(folder), str(file), "--to", "torch"]) == 0
    assert TOOL.main(["convert", str(file), str(back), "--to", "fsdp_dtensor"]) == 0
    flipped(file, weights)
    flipped(back / "iter_0000003" / "__0_0.distcp", weights)
    told = {file: "model.pt is not what was written (the checksum of", back: "__0_0.distcp is not what was written"}
    for path, message in told.items():
        assert TOOL.main(["verify", str(path)]) == 2
        assert TOOL.main(["convert", str(path), str(tmp_path / "new"), "--to", "fsdp_dtensor"]) == 2
        assert capsys.readouterr().err.count(message) == 2
    (back / "iter_0000003" / "manifest.json").unlink()
    assert TOOL.main(["verify", str(back)]) == 2
    assert f"model.module.{FC1}_w is not what was written (the checksum of" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "model.pt"]
    as_it_is = ["convert", str(back), str(tmp_path / "new"), "--to", "fsdp_dtensor", "--no-verify-checksums"]
    assert TOOL.main(as_it_is) == 0
    assert TOOL.main(["verify", str(folder)]) == 0
    assert "whole as far as torch's own checksums tell, 9 tensors" in capsys.readouterr().out, "there is no manifest"


@contextlib.contextmanager
def files_up_to(nbytes: int) -> Iterator[None]:
    """Inside, the system refuses to write more to a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_cannot_be_written_is_one_line_and_leaves_nothing(folder, tmp_path, capsys):
    targets = {
        form: ["convert", str(folder), str(tmp_path / "new"), "--to", form] for form in ("torch", "fsdp_dtensor")
    }
    with files_up_to(2000):
        assert [TOOL.main(command) for command in targets.values()] == [2, 2]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "cannot be written; is there space for it?" in said[0] and "File too large" in said[1]
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(os, "posix_fallocate", side_effect=full):  # The file has gaps, which need no space yet.
        assert TOOL.main(targets["torch"]) == 2
    assert "No space left on device" in capsys.readouterr().err
    file = tmp_path / "file"
    file.touch()
    assert TOOL.main(["convert", str(folder), str(file / "new.pt"), "--to", "torch"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_reader_that_has_seen_enough_is_no_error(folder, monkeypatch, capsys):
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert TOOL.main(["inspect", str(folder), "--json"]) == 141
    assert capsys.readouterr().err == ""


def test_mistakes_are_one_line(folder, tmp_path, capsys):
    assert TOOL.main(["inspect", str(tmp_path / "nowhere")]) == 2
    assert TOOL.main(["convert", str(folder), str(folder), "--to", "torch"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "does not exist" in said[0] and "exists; choose another name" in said[1]


class Runs:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return (open, (str(Path(__file__).with_name("never")), "w"))


def test_nothing_in_a_checkpoint_is_run(tmp_path, capsys):
    never = Path(__file__).with_name("never")
    folder = tmp_path / "evil"
    dcp.save({"weight": torch.ones(2), "args": argparse.Namespace(a=1, b=Runs(), c=[1, Runs()])},
             checkpoint_id=str(folder), no_dist=True)  # fmt: skip
    assert TOOL.main(["inspect", str(folder), "--values"]) == 0, "of arguments what is data can be read"
    shown = capsys.readouterr().out
    assert "args.a = 1" in shown and "args.b" not in shown and "args.c" not in shown
    dcp.save({"value": Runs()}, checkpoint_id=str(tmp_path / "value"), no_dist=True)
    assert TOOL.main(["inspect", str(tmp_path / "value")]) == 2
    torch.save({"a": torch.ones(1), "b": Runs()}, tmp_path / "file")
    assert TOOL.main(["inspect", str(tmp_path / "file")]) == 2
    (folder / ".metadata").write_bytes(pickle.dumps(Runs()))
    assert TOOL.main(["inspect", str(folder)]) == TOOL.main(["verify", str(folder)]) == 2
    assert "it names io.open" in capsys.readouterr().err
    assert not never.exists()


def test_converting_holds_few_tensors(tmp_path):
    alive, most = set(), 0

    def read() -> torch.Tensor:
        nonlocal most
        tensor = torch.ones(1000)
        alive.add(id(tensor))
        weakref.finalize(tensor, alive.discard, id(tensor))
        most = max(most, len(alive))
        return tensor

    source = {f"model.{i}": Entry(torch.Size([1000]), torch.float32, read) for i in range(20)}
    write_file(source, tmp_path / "file")
    write_folder(source, tmp_path / "folder")
    assert 1 <= most <= 3
    assert len(open_source(tmp_path / "file")) == len(open_source(tmp_path / "folder")) == 20
