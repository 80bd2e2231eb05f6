"""Text to Megatron's indexed data sets: JSON lines or plain text in, PREFIX_KEY_document.bin and .idx out.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \\
        --tokenizer-type ByteLevelTokenizer --append-eod --workers 8

Documents keep the order of the input whatever the number of workers, so the same input gives the same bytes.
"""

import argparse
import difflib
import os
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy

from megatron.training.launch import ignore_expected_warnings
from megatron.training.tokenizer import TOKENIZER_TYPES, TokenizerRequest, build_tokenizer

with warnings.catch_warnings():
    ignore_expected_warnings()  # of the imports below
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder, get_bin_path, get_idx_path

    from megatron.training.data.text import (
        JSON_SUFFIXES,
        TEXT_KEY,
        Encoding,
        batched,
        encode_all,
        find_files,
        read_documents,
    )


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of this tool."""

    encoding: Encoding
    """Options of turning documents into tokens."""

    input: tuple[str, ...]
    """Files, folders and patterns."""

    output_prefix: str
    """Beginning of the output's names."""

    input_format: str = "auto"
    """json, text, or auto: by the file's suffix."""

    lines_as_documents: bool = False
    """Every line of a plain text file is a document, not the whole file."""

    workers: int = 1
    """Processes that tokenize; 1 tokenizes in this process."""

    log_interval: int = 1000
    """Documents between two lines of progress; 0 for none."""


class Totals(NamedTuple):
    """Counts of a run."""

    documents: int
    nbytes: int
    tokens: int
    skipped: int
    prefixes: list[str]


class IndexedFiles:
    """A .bin and .idx pair under names of their own until commit(), so that a broken run leaves nothing to train on."""

    def __init__(self, prefix: str, dtype: type[numpy.number]) -> None:
        self.prefix = prefix
        self.tokens = 0
        self._partial = prefix + ".partial"
        self._builder = IndexedDatasetBuilder(get_bin_path(self._partial), dtype=dtype)

    def add(self, tokens: numpy.ndarray, lengths: Sequence[int]) -> None:
        """Appends documents of `lengths` tokens each."""
        start = 0
        for length in lengths:
            self._builder.add_document(tokens[start : start + length], [length])
            start += length
        self.tokens += start

    def commit(self) -> None:
        """Gives the files their names. An older index goes first: it must never describe the new tokens."""
        self._builder.finalize(get_idx_path(self._partial))
        Path(get_idx_path(self.prefix)).unlink(missing_ok=True)
        os.replace(get_bin_path(self._partial), get_bin_path(self.prefix))
        os.replace(get_idx_path(self._partial), get_idx_path(self.prefix))

    def discard(self) -> None:
        """Removes what was not committed."""
        self._builder.data_file.close()
        Path(get_bin_path(self._partial)).unlink(missing_ok=True)
        Path(get_idx_path(self._partial)).unlink(missing_ok=True)


class Progress:
    """Lines on stderr: documents, documents/s and MB/s."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._next = interval
        self._start = time.monotonic()

    def update(self, documents: int, nbytes: int) -> None:
        """Prints if another interval has passed."""
        if self._interval and documents >= self._next:
            seconds = max(time.monotonic() - self._start, 1e-9)
            rates = f"{documents / seconds:.0f} docs/s, {nbytes / seconds / 1e6:.2f} MB/s"
            print(f"processed {documents} documents ({rates})", file=sys.stderr, flush=True)
            self._next = (documents // self._interval + 1) * self._interval


def preprocess(job: Job) -> Totals:
    """Writes the data sets of a job; ValueError says what is wrong with its input, and then there is no output."""
    batches = batched(read_documents(find_files(job.input), job.input_format, job.lines_as_documents))
    dtype = DType.optimal_dtype(build_tokenizer(job.encoding.tokenizer).vocab_size)
    Path(job.output_prefix).parent.mkdir(parents=True, exist_ok=True)
    outputs: dict[str, IndexedFiles] = {}
    documents = nbytes = skipped = 0
    progress = Progress(job.log_interval)
    try:
        for key in job.encoding.json_keys:
            outputs[key] = IndexedFiles(f"{job.output_prefix}_{key}_document", dtype)
        for encoded in encode_all(batches, job.encoding, job.workers):
            for key, output in outputs.items():
                output.add(encoded.tokens[key], encoded.lengths[key])
            documents, nbytes = documents + encoded.documents, nbytes + encoded.nbytes
            skipped += encoded.skipped
            progress.update(documents, nbytes)
        for output in outputs.values():
            if output.tokens == 0:
                raise ValueError(f"{output.prefix} would be empty: {documents} documents gave no tokens")
        for output in outputs.values():
            output.commit()
    finally:
        for output in outputs.values():
            output.discard()
    tokens = sum(output.tokens for output in outputs.values())
    return Totals(documents, nbytes, tokens, skipped, [output.prefix for output in outputs.values()])


class _Parser(argparse.ArgumentParser):
    """Suggests the nearest option in place of one that does not exist."""

    def error(self, message: str) -> NoReturn:
        if "unrecognized arguments" in message:
            unknown = next((word for word in message.split() if word.startswith("--")), "")
            nearest = difflib.get_close_matches(unknown, self._option_string_actions, n=1)
            message += f"; did you mean {nearest[0]}?" if nearest else ""
        super().error(message)


def parse(argv: Sequence[str] | None = None) -> Job:
    """The job that a command line describes."""
    parser = _Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add_io_flags(parser.add_argument_group("input and output"))
    add_tokenizer_flags(parser.add_argument_group("tokenizer"))
    options = vars(parser.parse_args(argv))
    if options["workers"] < 1 or options["log_interval"] < 0:
        parser.error("--workers must be at least 1 and --log-interval at least 0")
    for name in ("input", "json_keys", "tokenizer_special_tokens"):
        options[name] = options[name] and tuple(dict.fromkeys(options[name]))
    request = TokenizerRequest(
        **{field.name: options[field.name] for field in fields(TokenizerRequest) if field.name in options}
    )
    encoding = Encoding(
        tokenizer=request,
        json_keys=options["json_keys"],
        append_eod=options["append_eod"],
        skip_undecodable=options["skip_undecodable"],
    )
    return Job(encoding=encoding, **{field.name: options[field.name] for field in fields(Job) if field.name in options})


def add_io_flags(group: argparse._ArgumentGroup) -> None:
    """Declares what is read and written."""
    group.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, folders (all files below) or quoted patterns (** goes through folders)",
    )
    group.add_argument(
        "--input-format",
        choices=("auto", "json", "text"),
        default="auto",
        help=f"auto: {', '.join(JSON_SUFFIXES)} are JSON lines, others plain text (default: %(default)s)",
    )
    group.add_argument(
        "--json-keys",
        nargs="+",
        default=[TEXT_KEY],
        metavar="KEY",
        help="keys of a JSON line to read, each into its own output (default: text)",
    )
    group.add_argument(
        "--lines-as-documents",
        action="store_true",
        help="plain text: every line is a document (default: every file is one)",
    )
    group.add_argument(
        "--skip-undecodable",
        action="store_true",
        help="plain text: leave out files (or lines) that are not UTF-8 (default: stop)",
    )
    group.add_argument(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="writes PREFIX_KEY_document.bin and .idx; KEY is text for plain text",
    )
    group.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document token")
    group.add_argument("--workers", type=int, default=1, help="processes that tokenize (default: %(default)s)")
    group.add_argument(
        "--log-interval",
        type=int,
        default=1000,
        metavar="N",
        help="documents between progress lines, 0 for none (default: %(default)s)",
    )


def add_tokenizer_flags(group: argparse._ArgumentGroup) -> None:
    """Declares Megatron-LM's tokenizer options."""
    group.add_argument("--tokenizer-type", required=True, choices=list(TOKENIZER_TYPES))
    group.add_argument("--tokenizer-model", metavar="PATH", help="tokenizer file or folder on disk")
    group.add_argument("--vocab-file", metavar="PATH", help="GPT2BPETokenizer's vocab.json")
    group.add_argument("--merge-file", metavar="PATH", help="GPT2BPETokenizer's merges.txt")
    group.add_argument(
        "--vocab-size", type=int, help="NullTokenizer: ids before the end-of-document id; TikTokenizer: ids in all"
    )
    group.add_argument(
        "--tokenizer-special-tokens",
        nargs="+",
        metavar="TOKEN",
        help="special tokens to add (HuggingFaceTokenizer) or to use (TikTokenizer)",
    )
    group.add_argument(
        "--tokenizer-hf-no-include-special-tokens",
        action="store_true",
        help="HuggingFaceTokenizer: without the tokens it puts around a text itself",
    )
    group.add_argument(
        "--tiktoken-pattern", choices=("v1", "v2"), help="TikTokenizer's splitting pattern (default: v2)"
    )
    group.add_argument(
        "--tiktoken-num-special-tokens",
        type=int,
        default=1000,
        help="TikTokenizer: ids kept for special tokens (default: %(default)s)",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; 0 if the data sets were written."""
    job = parse(argv)
    start = time.monotonic()
    try:
        totals = preprocess(job)
    except (ValueError, ImportError, OSError) as error:
        print(f"preprocess_data: error: {error}", file=sys.stderr)
        return 1
    seconds = max(time.monotonic() - start, 1e-9)
    print(
        f"{totals.documents} documents read, {totals.tokens} tokens, {totals.nbytes / 1e6:.2f} MB "
        f"in {seconds:.1f} s ({totals.nbytes / seconds / 1e6:.2f} MB/s); {totals.skipped} empty texts left out"
    )
    for prefix in totals.prefixes:
        print(f"--data-path {prefix}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
