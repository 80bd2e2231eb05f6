"""Checkpoints under other names, in other pieces or of another padding go on as the run that wrote them."""

from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron.training.checkpoint.offline.key_mapping import to_megatron_lm, to_plain, to_stored
from megatron.training.checkpoint.offline.lazy_reader import open_source
from megatron.training.checkpoint.offline.writer import write_folder
from megatron.training.errors import RunError
from tests.unit_tests.training.runs import Outcome, train

RUN = "--train-iters 3 --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 "
EMBEDDING = "embedding.word_embeddings.weight"
TABLES = (EMBEDDING, "output_layer.weight")
UNTIED = "--untie-embeddings-and-output-weights "


def run_all(*flags: str) -> list[Outcome]:
    return [train(RUN + each) for each in flags]


@pytest.fixture(scope="module")
def saved(mcore_ranks1, tmp_path_factory) -> tuple[Outcome, Path]:
    """A whole run, and the checkpoint in its middle."""
    folder = tmp_path_factory.mktemp("saved")
    (outcome,) = mcore_ranks1.run(run_all, f"--save {folder} --save-interval 2")[0]
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    return outcome, folder


def test_gated_weights_and_moments_are_stored_as_two(saved):
    names = open_source(saved[1])
    fc1 = "decoder.layers.1.mlp.linear_fc1.weight"
    for stored in (f"model.module.{fc1}", f"optimizer.state.{fc1}"):
        parts = {name.removeprefix(stored) for name in names if name.startswith(stored)}
        assert parts == ({"_w", "_v"} if stored[0] == "m" else {
            f"_{half}.{key}" for half in "wv" for key in ("exp_avg", "exp_avg_sq", "step")
        })  # fmt: skip
    assert f"optimizer.param_to_group_meta.{fc1}.lr" in names, "options are of the whole weight"


def older(source) -> dict:
    """As earlier versions of this package wrote it: gated weights whole, and all counts below `progress`."""
    plain = to_plain(source)
    del plain["gated_weights"], plain["args"]
    plain["progress.iteration"] = plain.pop("iteration")
    plain["progress.floating_point_operations"] = plain.pop("num_floating_point_operations_so_far")
    return {f"model.module.{name[6:]}" if name.startswith("model.") else name: plain[name] for name in plain}


def theirs(source) -> dict:
    """As Megatron-LM writes it where the optimizer counts steps in its groups."""
    stored = to_megatron_lm(source)
    for name in [name for name in stored if name.endswith(".step")]:
        if (parameter := name.split(".state.")[1].removesuffix(".step"))[-2:] in ("_w", "_v"):
            parameter = parameter[:-2]
        stored[f"optimizer.param_to_group_meta.{parameter}.step"] = int(stored.pop(name).read())
    for name in [name for name in stored if name.endswith(".wd_mult")]:
        del stored[name]
    return stored


def numbers(source) -> dict:
    """As it is, but for counts of steps, which optimizers may keep as plain numbers."""
    return {name: int(source[name].read()) if name.endswith(".step") else source[name] for name in source}


@pytest.mark.parametrize(("form", "flags"), [(older, ""), (theirs, "--no-load-rng"), (numbers, "")])
def test_what_others_wrote_is_resumed(mcore_ranks1, saved, tmp_path, form, flags):
    whole, folder = saved
    written = form(open_source(folder))
    if "iteration" not in written:  # the writer names the folder by it
        written = {**written, "iteration": 2}
    write_folder(written, tmp_path / "other")
    (resumed,) = mcore_ranks1.run(run_all, f"--load {tmp_path / 'other'} {flags}")[0]
    assert resumed.losses == whole.losses[2:] and resumed.state == whole.state
    for name, value in whole.weights.items():
        assert torch.equal(resumed.weights[name], value), name
    for name, value in whole.optimizer.items():
        assert torch.equal(resumed.optimizer[name], value), name


def test_what_is_in_one_piece_loads_at_its_own_tensor_parallel_size_only(mcore_ranks2, saved, tmp_path):
    """Rows are in the order of the ranks that wrote them."""
    source = open_source(saved[1])
    write_folder({**older(source), "args": source["args"], "iteration": 2}, tmp_path / "older")
    message = "linear_fc1.weight in one piece, with rows in the order of --tensor-model-parallel-size 1, not 2"
    flags = f"--load {tmp_path / 'older'} --tensor-model-parallel-size 2 --padded-vocab-size 128"
    mcore_ranks2.run_expecting(ValueError, message, run_all, flags)
    write_folder({**older(source), "iteration": 2}, tmp_path / "unknown")
    for warnings in mcore_ranks2.run(warned, flags.replace("older", "unknown") + " --no-load-rng"):
        assert sum("does not say for which --tensor-model-parallel-size; 2, as here" in each for each in warnings) == 1


def warned(flags: str) -> list[str]:
    from megatron.training.checkpoint.load import compatibility

    with mock.patch.object(compatibility, "logger") as log:
        train(RUN + flags)
    return [call.args[0] % call.args[1:] for call in log.warning.call_args_list]


def test_a_value_in_the_place_of_a_tensor_is_told(mcore_ranks1, saved, tmp_path):
    source = open_source(saved[1])
    for name, value, kind in (
        (f"model.module.{EMBEDDING}", 2.0, "float"),
        (f"optimizer.state.{EMBEDDING}.step", "x", "str"),
    ):
        write_folder({**source, name: value}, tmp_path / kind)
        message = f"no complete .*: rank 0 finds {name} to be of {kind}, not a tensor of shape"
        mcore_ranks1.run_expecting(ValueError, message, run_all, f"--load {tmp_path / kind}")


def loaded(flags: str) -> dict[str, dict[str, torch.Tensor]]:
    """The tables of the vocabulary and their moments right after a checkpoint was read."""
    from megatron.training.callbacks import Callback
    from megatron.training.checkpoint.format.flatten import flattened

    found = {}

    class Grab(Callback):
        def start(self, run):
            weights = dict(run.model.named_parameters())
            state = flattened(run.optimizer.fqn_state_dict()["state"])
            for table in TABLES:
                found[table] = {"weight": weights["module." + table].full_tensor().clone()}
                moments = {key: state[f"{table}.{key}"].full_tensor().clone() for key in ("exp_avg", "exp_avg_sq")}
                found[table].update(moments)

    train(RUN + UNTIED + flags, callbacks=[Grab()])
    return found


def test_another_padding_keeps_the_rows_of_every_id(mcore_ranks1, mcore_ranks2, tmp_path):
    mcore_ranks1.run(run_all, f"{UNTIED} --save {tmp_path / 'first'}")
    source = open_source(tmp_path / "first")
    keys = {
        "weight": "model.module.{}",
        "exp_avg": "optimizer.state.{}.exp_avg",
        "exp_avg_sq": "optimizer.state.{}.exp_avg_sq",
    }
    before = {table: {key: source[name.format(table)].read() for key, name in keys.items()} for table in TABLES}
    more = f"--train-iters 4 --lr-decay-iters 3 --padded-vocab-size 192 --load {tmp_path / 'first'} "
    for tables in mcore_ranks2.run(loaded, more + f"--no-load-rng --save {tmp_path / 'more'}"):
        for table, found in tables.items():
            for key, value in before[table].items():
                assert found[key].shape == (192, 32) and found[key][:128].equal(value), (table, key)
            assert not found["exp_avg"][128:].any() and found["weight"][128:].any(), "padding starts as in a new run"
    fewer = f"--train-iters 5 --lr-decay-iters 3 --load {tmp_path / 'more'} "
    fewer += "--tensor-model-parallel-size 2 --padded-vocab-size 128"
    stored = {table: open_source(tmp_path / "more")[f"model.module.{table}"].read() for table in TABLES}
    for tables in mcore_ranks2.run(loaded, fewer):
        for table, found in tables.items():
            assert found["weight"].equal(stored[table][:128]) and stored[table].shape == (192, 32)


def test_a_checkpoint_lacks_ids_of_the_tokenizer(mcore_ranks1, saved):
    message = r"word_embeddings.weight: \(128, 32\) in the checkpoint, \(256, 32\) in the run"
    mcore_ranks1.run_expecting(ValueError, message, run_all, f"--load {saved[1]} --vocab-size 200")


def test_the_model_of_the_checkpoint_is_taken(mcore_ranks1, saved):
    from megatron.training.config import ConfigError, load_config
    from megatron.training.job import prepare
    from megatron.training.launch import differing_flags
    from tests.unit_tests.training.runs import TINY

    whole, folder = saved
    other = f"--load {folder} --num-layers 3 --hidden-size 64 --vocab-size 99 --no-swiglu --bias-linear "
    (resumed,) = mcore_ranks1.run(run_all, other + "--use-checkpoint-args")[0]
    assert resumed.losses == whole.losses[2:]
    config = load_config((TINY + RUN + other + "--use-checkpoint-args").split())
    said = differing_flags(config, prepare(config, 1).config)
    assert "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 " in said and " --no-bias-linear " in said
    (folder.parent / "empty").mkdir(exist_ok=True)
    (folder.parent / "empty" / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(ConfigError, match="--use-checkpoint-args: .*iter_0000007 does not exist"):
        prepare(load_config((TINY + RUN + f"--load {folder.parent / 'empty'} --use-checkpoint-args").split()), 1)


def test_weights_to_begin_with(mcore_ranks1, saved, tmp_path):
    _, folder = saved
    begin = f"--pretrained-checkpoint {folder} "
    tuned, begun, resumed, alone = mcore_ranks1.run(
        run_all,
        f"--load {folder} --finetune",
        begin + f"--load {tmp_path} --save {tmp_path} --save-interval 2 --exit-interval 2",
        begin + f"--load {tmp_path}",
        begin + "--exit-interval 1",
    )[0]
    assert begun.losses == tuned.losses[:2] and resumed.losses == tuned.losses[2:] and alone.losses == tuned.losses[:1]
    mcore_ranks1.run_expecting(
        RunError, "--pretrained-checkpoint .* has no checkpoint", run_all, f"--pretrained-checkpoint {tmp_path / 'no'}"
    )


def test_another_format_is_named(mcore_ranks1, tmp_path):
    (tmp_path / "iter_0000004").mkdir()
    (tmp_path / "iter_0000004" / "metadata.json").touch()
    message = "has the format torch_dist, and only fsdp_dtensor can be read; convert it"
    mcore_ranks1.run_expecting(RunError, message, run_all, f"--load {tmp_path} --ckpt-step 4 --auto-detect-ckpt-format")


def test_a_bare_state_dict_is_where_tuning_begins(mcore_ranks1, saved, tmp_path):
    _, folder = saved
    bare = {
        n.removeprefix("model."): v.read() for n, v in to_plain(open_source(folder)).items() if n.startswith("model.")
    }
    torch.save(bare, tmp_path / "bare.pt")
    assert "decoder.layers.0.mlp.linear_fc1.weight" in bare
    write_folder(to_stored(open_source(tmp_path / "bare.pt"), is_gated=True), tmp_path / "converted")
    tuned, begun = mcore_ranks1.run(
        run_all, f"--load {folder} --finetune", f"--load {tmp_path / 'converted'} --finetune"
    )[0]
    assert begun.losses == tuned.losses


def start_where_it_ends(folder: Path) -> list[str]:
    from megatron.training import loop

    with mock.patch.object(loop, "logger") as log:
        assert train(RUN + f"--load {folder}").losses == []
    return [call.args[0] % call.args[1:] for call in log.info.call_args_list]


def test_a_run_that_is_done_says_so(mcore_ranks1, saved, tmp_path):
    write_folder({**open_source(saved[1] / "iter_0000003"), "iteration": 3}, tmp_path / "done")
    assert mcore_ranks1.run(start_where_it_ends, tmp_path / "done") == [["nothing to train: iteration 3 of 3 is done"]]
