"""Samples come in Megatron-LM's order, divided among ranks, and go on after a resume as if there had been no stop."""

import itertools
from pathlib import Path

import numpy
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron.training.data import (
    DataExhaustedError,
    DatasetRequest,
    LoaderOptions,
    MegatronPretrainingRandomSampler,
    MegatronPretrainingSampler,
    SampleCounts,
    build_data_loader,
    build_data_stream,
    build_train_valid_test_datasets,
    get_batch,
    sample_counts,
)
from megatron.training.tokenizer import TokenizerRequest, build_tokenizer

CPU = torch.device("cpu")
VOCAB = 100


def null_tokenizer(vocab_size: int = VOCAB):
    return build_tokenizer(TokenizerRequest(tokenizer_type="NullTokenizer", vocab_size=vocab_size))


def write_indexed(prefix: Path, documents: list[list[int]]) -> str:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for document in documents:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def constant_documents(token: int, count: int, length: int = 11) -> list[list[int]]:
    """Documents of one token, so that a sample shows which set it is from."""
    return [[token] * length for _ in range(count)]


def counting_documents(count: int, length: int = 16) -> list[list[int]]:
    """Document i is i, i + 1, ...: the labels are the inputs plus one inside a document."""
    return [[(index + position) % VOCAB for position in range(length)] for index in range(count)]


def build(counts: SampleCounts, vocab_size: int = VOCAB, **request):
    request = DatasetRequest(**{"seq_length": 8, **request})
    return build_train_valid_test_datasets(request, counts, null_tokenizer(vocab_size))


def options(rank: int = 0, size: int = 1, micro_batch_size: int = 2, **more) -> LoaderOptions:
    return LoaderOptions(
        micro_batch_size=micro_batch_size,
        data_parallel_rank=rank,
        data_parallel_size=size,
        **{"num_workers": 0, **more},
    )


def sampler(cls, rank: int, *, total=50, consumed=0, micro=2, size=3, **more):
    return cls(
        total_samples=total,
        consumed_samples=consumed,
        micro_batch_size=micro,
        data_parallel_rank=rank,
        data_parallel_size=size,
        **more,
    )


# Sizes


def test_sizes_are_megatron_lms():
    counts = sample_counts(train_iters=40, global_batch_size=32, eval_iters=5, eval_interval=15)
    assert counts == (40 * 32, (40 // 15 + 1) * 5 * 32, 5 * 32)
    no_interval = sample_counts(
        train_iters=40, global_batch_size=2, eval_iters=3, train_samples=7, full_validation=True
    )
    assert no_interval == (7, None, 6)
    assert sample_counts(train_iters=40, global_batch_size=2, eval_iters=3).valid == 6


# Samplers


def test_the_micro_batch_of_a_step_and_rank_is_megatron_lms():
    micro, size, steps = 2, 3, 4
    for rank in range(size):
        batches = list(sampler(MegatronPretrainingSampler, rank, total=24, micro=micro, size=size))
        first = [step * micro * size + rank * micro for step in range(steps)]
        assert batches == [[start, start + 1] for start in first]


@pytest.mark.parametrize("total", [12, 13, 50])
@pytest.mark.parametrize("consumed", [0, 6])
def test_ranks_partition_every_block_and_leave_out_the_last_partial_one(total, consumed):
    ranks = [sampler(MegatronPretrainingSampler, rank, total=total, consumed=consumed) for rank in range(3)]
    blocks = list(zip(*ranks, strict=True))
    assert len(blocks) == len(ranks[0]) == (total - consumed) // 6
    assert list(itertools.chain(*itertools.chain(*blocks))) == list(range(consumed, consumed + 6 * len(blocks)))


@pytest.mark.parametrize("sharding", [True, False])
def test_cyclic_epochs_read_every_sample_once_and_differ(sharding):
    ranks = [
        sampler(MegatronPretrainingRandomSampler, rank, total=48, data_sharding=sharding, size=3) for rank in range(3)
    ]
    streams = [itertools.chain.from_iterable(each) for each in ranks]
    epochs = [[list(itertools.islice(stream, 16)) for stream in streams] for _ in range(2)]
    for epoch in epochs:
        assert sorted(itertools.chain(*epoch)) == list(range(48))
    assert epochs[0] != epochs[1]
    if sharding:
        assert [min(part) // 16 for part in epochs[0]] == [0, 1, 2], "each rank reads its own part"


def test_cyclic_order_is_megatron_lms():
    epoch = 2
    generator = torch.Generator().manual_seed(epoch)
    expected = [16 + index for index in torch.randperm(16, generator=generator).tolist()]
    stream = iter(sampler(MegatronPretrainingRandomSampler, 1, total=50, consumed=48 * epoch + 6))
    assert list(itertools.chain(*itertools.islice(stream, 7))) == expected[2:]


@pytest.mark.parametrize("cls", [MegatronPretrainingSampler, MegatronPretrainingRandomSampler])
@pytest.mark.parametrize("stop", [1, 3, 7])
def test_resuming_reads_what_was_left(cls, stop):
    for rank in range(3):
        whole = list(itertools.islice(sampler(cls, rank), 8))
        resumed = list(itertools.islice(sampler(cls, rank, consumed=stop * 6), 8 - stop))
        assert resumed == whole[stop:]


def test_unsharded_cyclic_ranks_stay_together_where_the_set_does_not_divide():
    streams = [
        iter(sampler(MegatronPretrainingRandomSampler, rank, total=7, micro=1, size=2, data_sharding=False))
        for rank in range(2)
    ]
    for _ in range(3):
        epoch = [[next(stream)[0] for _ in range(3)] for stream in streams]
        assert len(set(itertools.chain(*epoch))) == 6


def test_sampler_mistakes():
    for cls, arguments, said in (
        (MegatronPretrainingSampler, {"consumed": 50}, "50 of the data set's 50 are consumed"),
        (MegatronPretrainingSampler, {"total": 0}, "0 samples"),
        (MegatronPretrainingSampler, {"micro": 0}, "micro_batch_size >= 1"),
        (MegatronPretrainingRandomSampler, {"total": 5}, "fewer than the 6"),
        (MegatronPretrainingRandomSampler, {"consumed": 5}, "not whole micro-batches"),
    ):
        with pytest.raises(ValueError, match=said):
            sampler(cls, 0, **arguments)
    with pytest.raises(ValueError, match="not in a group of 3"):
        sampler(MegatronPretrainingSampler, 3)


# Data sets


def test_mock_data_is_megatron_cores():
    datasets = build(SampleCounts(40, 0, 0), vocab_size=31, mock_data=True, split="99,1,0", seq_length=64)
    assert datasets.valid is None and datasets.test is None
    sample = datasets.train[3]
    assert sample["tokens"].max() < 32 and len(datasets.train) >= 40
    torch.testing.assert_close(sample["tokens"][1:], sample["labels"][:-1])
    steps = (sample["labels"] - sample["tokens"]) % 32
    assert (steps == 1).float().mean() > 0.9, "counts up, modulo the vocabulary"


def test_indexed_files_come_back_as_tokens(tmp_path):
    documents = counting_documents(40)
    prefix = write_indexed(tmp_path / "data", documents)
    datasets = build(SampleCounts(40, 8, 0), data_path=[prefix], split="80,20,0", seed=3)
    # 32 training documents of 16 tokens: 63 samples of 8 tokens in an epoch, and one more token for the last label.
    assert len(datasets.train) == 63 and len(datasets.valid) >= 8 and datasets.test is None
    starts = {sample["tokens"][0].item() for sample in (datasets.train[i] for i in range(63))}
    assert starts <= {document[at] for document in documents[:32] for at in (0, 8)}
    repeated = build(SampleCounts(200, 0, 0), data_path=[prefix], split="80,20,0").train
    assert len(repeated) >= 200, "one set is repeated as often as the run needs"


def test_splits_never_share_documents(tmp_path):
    prefix = write_indexed(tmp_path / "data", [[token] * 10 for token in range(60)])
    datasets = build(SampleCounts(30, 10, 5), data_path=[prefix], split="4,1,1")
    seen = [{token for i in range(len(each)) for token in each[i]["tokens"].tolist()} for each in datasets]
    assert seen[0] <= set(range(40)) and seen[1] <= set(range(40, 50)) and seen[2] <= set(range(50, 60))


def test_weighted_blend_draws_in_proportion_and_unweighted_reads_each_once(tmp_path):
    one = write_indexed(tmp_path / "one", constant_documents(1, 40))
    two = write_indexed(tmp_path / "two", constant_documents(2, 20))
    weighted = build(SampleCounts(200, 0, 0), data_path=["3", one, "1", two], split="1,0,0").train
    from_one = sum(weighted[i]["tokens"][0].item() == 1 for i in range(200))
    assert from_one == 150
    once = build(SampleCounts(200, 0, 0), data_path=[one, two], split="1,0,0").train
    sizes = [(40 * 11 - 1) // 8, (20 * 11 - 1) // 8]
    assert len(once) == sum(sizes)
    assert sum(once[i]["tokens"][0].item() == 2 for i in range(len(once))) == sizes[1]


def test_a_path_per_split(tmp_path):
    paths = {
        f"{name}_data_path": [write_indexed(tmp_path / name, constant_documents(token, 9))]
        for token, name in enumerate(("train", "valid", "test"))
    }
    datasets = build(SampleCounts(20, 6, 3), **paths)
    assert [each[0]["tokens"].unique().tolist() for each in datasets] == [[0], [1], [2]]
    assert build(SampleCounts(20, 0, 3), **paths).valid is None
    whole = build(SampleCounts(20, None, 0), **paths).valid
    assert len(whole) == (9 * 11 - 1) // 8, "exactly one epoch"


def test_a_short_unweighted_blend_is_announced(tmp_path, caplog):
    prefixes = [write_indexed(tmp_path / name, constant_documents(1, 5)) for name in "ab"]
    build(SampleCounts(500, 0, 0), data_path=prefixes, split="1,0,0")
    assert "fewer than the run's 500" in caplog.text


def test_masks_and_positions_follow_documents(tmp_path):
    eod = VOCAB
    prefix = write_indexed(tmp_path / "data", [[5, 6, 7, eod]] * 30)
    flags = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
    sample = build(SampleCounts(10, 0, 0), data_path=[prefix], split="1,0,0", **flags).train[0]
    assert sample["tokens"].tolist() == [5, 6, 7, eod] * 2
    assert sample["position_ids"].tolist() == [0, 1, 2, 3] * 2
    assert sample["loss_mask"].tolist() == [1, 1, 1, 0] * 2
    mask = sample["attention_mask"]
    assert mask.shape == (1, 8, 8) and mask[0, 4:, :4].all() and not mask[0, 7, 4:].any()


def test_files_made_anew_never_meet_old_indices(tmp_path):
    for token, count in ((1, 50), (2, 10)):
        prefix = write_indexed(tmp_path / "data", constant_documents(token, count))
        train = build(SampleCounts(20, 0, 0), data_path=[prefix], split="1,0,0").train
        assert {train[i]["tokens"].unique().item() for i in range(20)} == {token}


@pytest.mark.parametrize(
    ("request_", "counts", "said"),
    [
        ({"data_path": ["nowhere"]}, (9, 0, 0), "nowhere.idx does not exist; make it with"),
        ({"data_path": ["1", "{prefix}", "{prefix}", "{prefix}"]}, (9, 0, 0), "with and without weights"),
        ({"data_path": ["0", "{prefix}", "1", "{prefix}"]}, (9, 0, 0), "weights must be positive"),
        ({"data_path": ["1", "{prefix}"]}, (9, None, 0), "must have no weights"),
        (
            {"data_path": ["{prefix}"], "split": "999,1,0"},
            (9, 4, 0),
            "valid part has 0 tokens in 0 of 20 .*: 0 makes no valid",
        ),
        ({"data_path": ["{prefix}"], "split": "0,1,1"}, (9, 0, 0), "no data to train on"),
        ({"valid_data_path": ["{prefix}"]}, (9, 0, 0), "no data to train on"),
        ({"data_path": ["{prefix}"], "seq_length": 500, "split": "1,1,0"}, (9, None, 0), "expected at least 501"),
        ({"data_path": ["{prefix}"], "split": "1e-3,1"}, (9, 0, 0), "--split is '1e-3,1'"),
        ({"data_path": ["{prefix}"], "split": "1,1,1,1"}, (9, 0, 0), "up to three shares"),
        ({"data_path": ["{prefix}"], "mock_data": True}, (9, 0, 0), "exactly one source of data"),
        ({}, (9, 0, 0), "exactly one source of data"),
        ({"train_data_path": ["{prefix}"], "split": "1,1"}, (9, 0, 0), "--split divides --data-path"),
        ({"mock_data": True, "seq_length": 0}, (9, 0, 0), "--seq-length is 0"),
        (
            {"mock_data": True, "reset_attention_mask": True, "create_attention_mask_in_dataloader": False},
            (9, 0, 0),
            "--reset-attention-mask needs",
        ),
    ],
)
def test_mistakes_are_named_before_anything_is_built(tmp_path, request_, counts, said):
    prefix = write_indexed(tmp_path / "data", constant_documents(1, 20))
    filled = {
        name: [word.format(prefix=prefix) for word in value] if isinstance(value, list) else value
        for name, value in request_.items()
    }
    with pytest.raises(ValueError, match=said):
        build(SampleCounts(*counts), **filled)


def test_data_of_another_tokenizer_is_refused(tmp_path):
    prefix = write_indexed(tmp_path / "data", [[1, 2, 300]] * 9)
    with pytest.raises(ValueError, match="holds token 300, but the tokenizer has 101"):
        build(SampleCounts(9, 0, 0), data_path=[prefix], split="1,0,0")


def test_a_cache_folder_needs_the_process_group(tmp_path):
    prefix = write_indexed(tmp_path / "data", constant_documents(1, 20))
    with pytest.raises(RuntimeError, match="init_process_group"):
        build(SampleCounts(9, 0, 0), data_path=[prefix], split="1,0,0", data_cache_path=tmp_path / "cache")


# Loading


@pytest.fixture
def train_set(tmp_path):
    prefix = write_indexed(tmp_path / "data", counting_documents(40))
    return build(SampleCounts(70, 0, 0), data_path=[prefix], split="1,0,0").train


def test_batches_have_the_models_shapes(train_set):
    stream = build_data_stream(train_set, "train", 0, options())
    batch = get_batch(stream, CPU)
    assert batch.tokens.shape == batch.labels.shape == batch.loss_mask.shape == batch.position_ids.shape == (2, 8)
    assert batch.attention_mask.shape == (2, 1, 8, 8) and batch.attention_mask.dtype == torch.bool
    assert batch.tokens.dtype == torch.int64 and batch.loss_mask.dtype == torch.float32
    torch.testing.assert_close(batch.tokens, torch.stack([train_set[0]["tokens"], train_set[1]["tokens"]]))
    without = build(SampleCounts(9, 0, 0), mock_data=True, create_attention_mask_in_dataloader=False).train
    assert get_batch(build_data_stream(without, "train", 0, options()), CPU).attention_mask is None


@pytest.mark.parametrize("dataloader_type", ["single", "cyclic"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_stream_goes_on_and_leaves_torchs_generator_alone(train_set, dataloader_type, num_workers):
    state = torch.get_rng_state()
    how = {"dataloader_type": dataloader_type, "num_workers": num_workers}
    for rank in range(2):
        stream = build_data_stream(train_set, "train", 0, options(rank, 2, **how))
        whole = [get_batch(stream, CPU).tokens for _ in range(6)]
        stream.close()
        stream = build_data_stream(train_set, "train", 8, options(rank, 2, **how))
        rest = [get_batch(stream, CPU).tokens for _ in range(4)]
        stream.close()
        torch.testing.assert_close(torch.stack(rest), torch.stack(whole[2:]))
    assert torch.equal(state, torch.get_rng_state())


def test_a_resume_on_other_ranks_reads_the_same_global_batches(train_set):
    def global_batches(size: int, micro: int, consumed: int) -> torch.Tensor:
        streams = [build_data_stream(train_set, "t", consumed, options(rank, size, micro)) for rank in range(size)]
        steps = (48 - consumed) // 12
        blocks = 12 // (size * micro)
        return torch.stack(
            [torch.cat([get_batch(s, CPU).tokens for _ in range(blocks) for s in streams]) for _ in range(steps)]
        )

    whole = global_batches(size=2, micro=3, consumed=0)
    torch.testing.assert_close(global_batches(size=3, micro=2, consumed=12), whole[1:])
    torch.testing.assert_close(global_batches(size=1, micro=4, consumed=24), whole[2:])


def test_running_out_says_which_set_and_how_far(train_set):
    consumed = len(train_set) - 5
    stream = build_data_stream(train_set, "validation", consumed, options())
    assert next(stream)["tokens"].shape == next(stream)["tokens"].shape
    with pytest.raises(DataExhaustedError, match=rf"validation .* 2 micro-batches .* {len(train_set)} samples"):
        next(stream)
    stream.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(stream)


def test_loader_options(train_set):
    assert build_data_stream(None, "test", 0, options()) is None
    assert not build_data_loader(train_set, 0, options()).pin_memory
    assert build_data_loader(train_set, 0, options(device=torch.device("cuda"))).pin_memory
    for mistake in ({"dataloader_type": "external"}, {"num_workers": -1}):
        with pytest.raises(ValueError, match=next(iter(mistake)).replace("_", "-")):
            options(**mistake)


# Ranks


def blend_on_ranks(prefixes: list[str], cache: str) -> list[list[int]]:
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    blend = ["0.7", prefixes[0], "0.3", prefixes[1]]
    datasets = build(SampleCounts(24, 8, 0), data_path=blend, split="3,1,0", data_cache_path=cache)
    stream = build_data_stream(datasets.train, "train", 0, options(rank, size))
    mock = build(SampleCounts(4, 0, 0), mock_data=True)
    assert len(mock.train) >= 4 and mock.valid is None
    return [next(stream)["tokens"].tolist() for _ in range(3)]


def test_ranks_build_one_blend_and_read_its_parts(mcore_ranks2, tmp_path):
    prefixes = [write_indexed(tmp_path / str(i), counting_documents(30 + i)) for i in range(2)]
    read = mcore_ranks2.run(blend_on_ranks, prefixes, str(tmp_path / "cache"))
    alone = build(SampleCounts(24, 8, 0), data_path=["0.7", prefixes[0], "0.3", prefixes[1]], split="3,1,0").train
    expected = [
        [alone[4 * step + 2 * rank + i]["tokens"].tolist() for i in range(2)] for step in range(3) for rank in range(2)
    ]
    assert [read[rank][step] for step in range(3) for rank in range(2)] == expected
    assert any((tmp_path / "cache").glob("*BlendedDataset-train*")), "the cache folder was used"
    again = mcore_ranks2.run(blend_on_ranks, prefixes, str(tmp_path / "cache"))
    assert again == read
