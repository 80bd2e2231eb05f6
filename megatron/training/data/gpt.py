"""Data sets of GPT samples, built by megatron-core from indexed files or mocked, checked before ranks wait for others.

megatron-core builds on rank 0 first and lets the others read its index cache. A mistake that only rank 0 noticed would
leave the others waiting, so what can be wrong with the files and options is looked at on every rank before.
"""

import hashlib
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset, get_bin_path, get_idx_path
from megatron.core.datasets.utils import Split, get_blend_from_list
from torch.utils.data import Dataset

from megatron.training.config.flags import is_number
from megatron.training.ranks import ON_EVERY_RANK
from megatron.training.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

DEFAULT_SPLIT = "969, 30, 1"
"""Megatron-LM's split of --data-path where none is given."""

_PROBED_TOKENS = 1 << 16
_PROBED_BYTES = 1 << 20

Blend = tuple[list[str], list[float] | None]


@dataclass(frozen=True, kw_only=True)
class DatasetRequest:
    """Sources of the samples to train, validate and test on; names are Megatron-LM's options."""

    seq_length: int
    """Tokens per sample."""

    seed: int = 1234
    """Seed of the shuffles."""

    mock_data: bool = False
    """Counting sequences instead of files."""

    data_path: Sequence[str] | None = None
    """Prefixes of indexed files, or weight and prefix in turn; `split` divides each set's documents."""

    split: str | None = None
    """Shares of train, valid and test for data_path, e.g. 99,1,0. Mock data is split evenly whatever this says."""

    train_data_path: Sequence[str] | None = None
    """Like data_path, for training only."""

    valid_data_path: Sequence[str] | None = None
    """Like data_path, for validation only."""

    test_data_path: Sequence[str] | None = None
    """Like data_path, for testing only."""

    data_cache_path: str | Path | None = None
    """Folder for the shuffled indices, on a disk that all ranks see; beside the data if None."""

    reset_position_ids: bool = False
    """Count positions from the start of each document."""

    reset_attention_mask: bool = False
    """Forbid attention across documents."""

    eod_mask_loss: bool = False
    """Leave the end-of-document inputs out of the loss."""

    create_attention_mask_in_dataloader: bool = True
    """Make the attention masks here; False where the attention kernels know causality."""

    mmap_bin_files: bool = True
    """Map the token files instead of reading them."""

    num_dataset_builder_threads: int = 1
    """Sets of a blend that are indexed at the same time."""

    mid_level_dataset_surplus: float = 0.005
    """Samples to index beyond a weighted set's share, as a fraction."""

    def __post_init__(self) -> None:
        per_split = (self.train_data_path, self.valid_data_path, self.test_data_path)
        sources = [self.mock_data, bool(self.data_path), any(per_split)]
        if sum(sources) != 1:
            raise ValueError(
                "expected exactly one source of data: --data-path, or --train-data-path with --valid-data-path and "
                f"--test-data-path, or --mock-data; got {sum(sources)} of them"
            )
        if self.seq_length < 1:
            raise ValueError(f"--seq-length is {self.seq_length}; expected at least 1")
        if self.split is not None:
            _check_split(self.split)
            if any(per_split):
                raise ValueError("--split divides --data-path; it has no meaning with --train-data-path and the like")
        if self.reset_attention_mask and not self.create_attention_mask_in_dataloader:
            raise ValueError(
                "--reset-attention-mask needs the masks that --no-create-attention-mask-in-dataloader drops"
            )


class SampleCounts(NamedTuple):
    """Samples that a whole run reads; 0 for a set that is not needed, None for exactly one epoch."""

    train: int | None
    valid: int | None
    test: int | None


class Datasets(NamedTuple):
    """The three sets; None where no samples were asked for or no path was given."""

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None


def sample_counts(
    *,
    train_iters: int,
    global_batch_size: int,
    eval_iters: int,
    eval_interval: int | None = None,
    train_samples: int | None = None,
    full_validation: bool = False,
) -> SampleCounts:
    """Megatron-LM's sizes: an evaluation every `eval_interval` iterations (never if None) and one at the end."""
    evaluations = train_iters // eval_interval + 1 if eval_interval else 1
    return SampleCounts(
        train=train_iters * global_batch_size if train_samples is None else train_samples,
        valid=None if full_validation else evaluations * eval_iters * global_batch_size,
        test=eval_iters * global_batch_size,
    )


def build_train_valid_test_datasets(request: DatasetRequest, counts: SampleCounts, tokenizer: Tokenizer) -> Datasets:
    """The sets that `counts` asks for. **collective** over the default process group, if there is one."""
    datasets = _build(request, counts, tokenizer)
    # Every rank has the same options and files, so that all raise here or none does.
    if counts.train != 0 and datasets.train is None:
        raise ValueError("no data to train on; give --train-data-path, or a --split whose first share is above 0")
    for split, dataset, count in zip(Split, datasets, counts, strict=True):
        if dataset is not None and count is not None and len(dataset) < count:
            logger.warning(
                "the %s data set has %d samples, fewer than the run's %d: sets without weights are not repeated; "
                "give weights, or fewer iterations",
                split.name,
                len(dataset),
                count,
                extra=ON_EVERY_RANK,
            )
    return datasets


def _build(request: DatasetRequest, counts: SampleCounts, tokenizer: Tokenizer) -> Datasets:
    wanted = [count != 0 for count in counts]
    blend = _read_blend(request.data_path, "--data-path") if request.data_path else None
    blend_per_split = None
    if blend is None and not request.mock_data:
        blend_per_split = [each if want else None for each, want in zip(_split_blends(request), wanted, strict=True)]
        wanted = [each is not None for each in blend_per_split]
    if not any(wanted):
        return Datasets(None, None, None)  # megatron-core would take no blends at all for a wish to have mock data
    config = _config(request, tokenizer, blend, blend_per_split)
    if config.split_matrix is not None:
        # megatron-core never returns from indexing a split without documents, needed or not.
        config.split_matrix = [part if want else None for part, want in zip(config.split_matrix, wanted, strict=True)]
    if not request.mock_data:
        _check_files(config, counts)
    sizes = [count if want else 0 for count, want in zip(counts, wanted, strict=True)]
    dataset_class = MockGPTDataset if request.mock_data else ContentKeyedGPTDataset
    return Datasets(*BlendedMegatronDatasetBuilder(dataset_class, sizes, lambda: True, config).build())


class ContentKeyedGPTDataset(GPTDataset):
    """GPTDataset whose cached indices belong to the files' content, so that files made anew never meet old indices."""

    def _build_document_sample_shuffle_indices(self) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
        self.unique_identifiers["content"] = _fingerprint(self.dataset_path)
        self.unique_description += "\n" + self.unique_identifiers["content"]
        digest = hashlib.md5(self.unique_description.encode("utf-8"), usedforsecurity=False)
        self.unique_description_hash = digest.hexdigest()
        return super()._build_document_sample_shuffle_indices()


def _fingerprint(prefix: str) -> str:
    """Digest of both sizes and of the index's ends: what indices depend on, without reading gigabytes."""
    digest = hashlib.md5(str(os.path.getsize(get_bin_path(prefix))).encode(), usedforsecurity=False)
    size = os.path.getsize(get_idx_path(prefix))
    with open(get_idx_path(prefix), "rb") as stream:
        for offset in (0, max(0, size - _PROBED_BYTES)):
            stream.seek(offset)
            digest.update(stream.read(_PROBED_BYTES))
    digest.update(str(size).encode())
    return digest.hexdigest()


def _config(
    request: DatasetRequest, tokenizer: Tokenizer, blend: Blend | None, blend_per_split: list[Blend | None] | None
) -> GPTDatasetConfig:
    return GPTDatasetConfig(
        random_seed=request.seed,
        sequence_length=request.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=(request.split or DEFAULT_SPLIT) if blend else None,
        num_dataset_builder_threads=request.num_dataset_builder_threads,
        path_to_cache=None if request.data_cache_path is None else os.fspath(request.data_cache_path),
        mmap_bin_files=request.mmap_bin_files,
        tokenizer=tokenizer,
        mid_level_dataset_surplus=request.mid_level_dataset_surplus,
        reset_position_ids=request.reset_position_ids,
        reset_attention_mask=request.reset_attention_mask,
        eod_mask_loss=request.eod_mask_loss,
        create_attention_mask=request.create_attention_mask_in_dataloader,
    )


def _check_split(split: str) -> None:
    parts = [part.strip() for part in split.split(",")]
    # megatron-core picks the digits out of the text, and would read 1e-3 as two shares.
    shares = [float(part) if re.fullmatch(r"\d+\.?\d*|\.\d+", part) else -1.0 for part in parts]
    if len(shares) > 3 or min(shares) < 0 or sum(shares) <= 0:
        raise ValueError(f"--split is {split!r}; expected up to three shares like 99,1,0, not negative and not all 0")


def _split_blends(request: DatasetRequest) -> list[Blend | None]:
    paths = {
        "--train-data-path": request.train_data_path,
        "--valid-data-path": request.valid_data_path,
        "--test-data-path": request.test_data_path,
    }
    return [_read_blend(value, flag) if value else None for flag, value in paths.items()]


def _read_blend(words: Sequence[str], flag: str) -> Blend:
    """Prefixes and weights of a flag; weights only if every second word from the first on is a number."""
    words = [str(word).strip() for word in words]
    if len(words) % 2 == 0:
        numeric = [is_number(word) for word in words[::2]]
        if any(numeric) and not all(numeric):
            raise ValueError(f"{flag} mixes prefixes with and without weights: {' '.join(words)}")
    prefixes, weights = get_blend_from_list(words)
    if weights is not None and min(weights) <= 0:
        raise ValueError(f"{flag}: weights must be positive, got {weights}; leave out a set that should not be read")
    return list(prefixes), weights


def _check_files(config: GPTDatasetConfig, counts: SampleCounts) -> None:
    """Raises for what would stop megatron-core on one rank only, or never stop it."""
    blends = [config.blend] * len(Split) if config.blend else config.blend_per_split
    parts = config.split_matrix or [None if blend is None else (0.0, 1.0) for blend in blends]
    for split, blend, part, count in zip(Split, blends, parts, counts, strict=True):
        if part is None:
            continue
        prefixes, weights = blend
        if count is None and weights is not None:
            raise ValueError(f"one whole epoch of the {split.name} data is read, so its paths must have no weights")
        one_epoch = count is None or (len(prefixes) > 1 and weights is None)
        for prefix in prefixes:
            _check_part(prefix, split, part, config.sequence_length + 1 if one_epoch else 1, config)
    if config.path_to_cache and not torch.distributed.is_initialized():
        raise RuntimeError("data sets with a --data-cache-path are built after torch.distributed.init_process_group")


def _check_part(
    prefix: str, split: Split, part: tuple[float, float], minimum_tokens: int, config: GPTDatasetConfig
) -> None:
    missing = [path for path in (get_idx_path(prefix), get_bin_path(prefix)) if not os.path.exists(path)]
    if missing:
        raise ValueError(f"data prefix {prefix!r}: {missing[0]} does not exist; make it with tools/preprocess_data.py")
    indexed = IndexedDataset(prefix, mmap=config.mmap_bin_files)
    lengths = indexed.sequence_lengths
    begin, end = (int(round(bound * float(len(lengths)))) for bound in part)
    tokens = int(lengths[begin:end].sum(dtype=numpy.int64))
    if tokens < minimum_tokens:
        raise ValueError(
            f"data prefix {prefix!r}: the {split.name} part has {tokens} tokens in {end - begin} of {len(lengths)} "
            f"documents; expected at least {minimum_tokens}. Use more documents, or change --split: 0 makes no "
            f"{split.name} part"
        )
    probe = indexed.get(begin, length=min(int(lengths[begin]), _PROBED_TOKENS))
    if probe.size and int(probe.max()) >= config.tokenizer.vocab_size:
        raise ValueError(
            f"data prefix {prefix!r} holds token {int(probe.max())}, but the tokenizer has "
            f"{config.tokenizer.vocab_size} ids; was it made with another tokenizer?"
        )
