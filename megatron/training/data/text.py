"""Text files to tokens in the order of the input, with many processes; the reading half of tools/preprocess_data.py."""

import glob
import itertools
import json
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy

from megatron.training.tokenizer import Tokenizer, TokenizerRequest, build_tokenizer

JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
TEXT_KEY = "text"
BATCH_BYTES = 1 << 20
BATCH_DOCUMENTS = 1000
BATCHES_AHEAD_PER_WORKER = 4
LONE_SURROGATES = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """Options of turning documents into tokens; sent to the workers."""

    tokenizer: TokenizerRequest
    """The tokenizer to build."""

    json_keys: tuple[str, ...] = (TEXT_KEY,)
    """Keys of a JSON line that hold text, each with its own output."""

    append_eod: bool = False
    """End every document with the tokenizer's end-of-document id."""

    skip_undecodable: bool = False
    """Leave out plain text that is not UTF-8 instead of raising."""


class Document(NamedTuple):
    """A piece of input, not yet decoded."""

    place: str
    """file:line, or the file, for messages."""
    is_json: bool
    """A JSON line, else plain text."""
    content: bytes
    """As read."""


class Encoded(NamedTuple):
    """A batch of documents as tokens."""

    tokens: dict[str, numpy.ndarray]
    """By key: the documents' tokens one after another."""
    lengths: dict[str, list[int]]
    """By key: tokens per document; documents without text are left out."""
    documents: int
    """Documents read."""
    nbytes: int
    """Bytes read."""
    skipped: int
    """Texts left out because they were empty or could not be decoded."""


def find_files(patterns: Sequence[str]) -> list[Path]:
    """Files of all patterns, in the order given; those of a folder or a pattern sorted, and no file twice."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            matches = sorted(entry for entry in path.rglob("*") if entry.is_file())
        elif path.exists():
            matches = [path]
        else:
            matches = sorted(Path(match) for match in glob.glob(pattern, recursive=True) if os.path.isfile(match))
        if not matches:
            raise ValueError(f"--input {pattern}: no such file, and no files in or matching it")
        found.update(dict.fromkeys(matches))
    return list(found)


def read_documents(files: Iterable[Path], input_format: str, lines_as_documents: bool) -> Iterator[Document]:
    """Documents of the files, in order; JSON lines and, if so asked, text lines without the empty ones."""
    for path in files:
        is_json = input_format == "json" or (input_format == "auto" and path.suffix.lower() in JSON_SUFFIXES)
        if not is_json and not lines_as_documents:
            yield Document(str(path), False, path.read_bytes())
            continue
        with open(path, "rb") as stream:
            for number, line in enumerate(stream, start=1):
                if content := line.strip(b"\r\n"):
                    if content.strip():
                        yield Document(f"{path}:{number}", is_json, content)


def batched(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents in batches of about BATCH_BYTES, so that a worker's task costs more than sending it."""
    batch: list[Document] = []
    nbytes = 0
    for document in documents:
        batch.append(document)
        nbytes += len(document.content)
        if nbytes >= BATCH_BYTES or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


class Encoder:
    """Turns batches of documents into tokens; one per process."""

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self._tokenizer: Tokenizer = build_tokenizer(encoding.tokenizer)

    def encode(self, batch: Sequence[Document]) -> Encoded:
        """Tokens of a batch; ValueError names the file and line of a document that cannot be read."""
        tokens: dict[str, list[numpy.ndarray]] = {key: [] for key in self._encoding.json_keys}
        skipped = 0
        for document in batch:
            for key, text in self._texts(document).items():
                ids = self._ids(document, text) if text else []
                if ids:
                    tokens[key].append(numpy.array(ids, dtype=numpy.int32))
                else:
                    skipped += 1
        empty = numpy.empty(0, dtype=numpy.int32)
        return Encoded(
            tokens={key: numpy.concatenate([empty, *arrays]) for key, arrays in tokens.items()},
            lengths={key: [len(array) for array in arrays] for key, arrays in tokens.items()},
            documents=len(batch),
            nbytes=sum(len(document.content) for document in batch),
            skipped=skipped,
        )

    def _ids(self, document: Document, text: str) -> list[int]:
        # JSON can spell halves of characters, which no encoding can write.
        text = LONE_SURROGATES.sub("\ufffd", text)
        try:
            ids = self._tokenizer.tokenize(text)
        except ValueError as error:
            raise ValueError(f"{document.place}: {error}") from error
        return [*ids, self._tokenizer.eod] if ids and self._encoding.append_eod else ids

    def _texts(self, document: Document) -> dict[str, str]:
        try:
            text = document.content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            if self._encoding.skip_undecodable and not document.is_json:
                return dict.fromkeys(self._encoding.json_keys[:1], "")
            raise ValueError(f"{document.place}: not UTF-8 text ({error.reason} at byte {error.start})") from None
        if not document.is_json:
            if TEXT_KEY not in self._encoding.json_keys:
                raise ValueError(f"{document.place} is plain text, but --json-keys leaves out the key {TEXT_KEY!r}")
            return {TEXT_KEY: text}
        try:
            record = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{document.place}: not a JSON value on one line: {error}") from None
        return {key: _text_of(record, key, document.place) for key in self._encoding.json_keys}


def _text_of(record: object, key: str, place: str) -> str:
    if not isinstance(record, dict):
        raise ValueError(f"{place}: expected a JSON object with the key {key!r}; got {type(record).__name__}")
    if key not in record:
        raise ValueError(
            f"{place}: no key {key!r}; the keys are {', '.join(map(repr, record))}. Choose with --json-keys"
        )
    if not isinstance(record[key], str):
        raise ValueError(f"{place}: the value of {key!r} must be text; got {type(record[key]).__name__}")
    return record[key]


_process_encoder: Encoder | None = None


def _start_worker(encoding: Encoding) -> None:
    global _process_encoder
    # Rust threads of a tokenizer would compete with the other workers.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _process_encoder = Encoder(encoding)


def _encode_in_worker(batch: list[Document]) -> Encoded:
    assert _process_encoder is not None
    return _process_encoder.encode(batch)


def encode_all(batches: Iterator[list[Document]], encoding: Encoding, workers: int) -> Iterator[Encoded]:
    """Encoded batches in the order of `batches`, a bounded number of them in memory."""
    if workers == 1:
        yield from map(Encoder(encoding).encode, batches)
        return
    with ProcessPoolExecutor(workers, initializer=_start_worker, initargs=(encoding,)) as pool:
        pending: deque[Future[Encoded]] = deque()
        try:
            for batch in itertools.islice(batches, workers * BATCHES_AHEAD_PER_WORKER):
                pending.append(pool.submit(_encode_in_worker, batch))
            while pending:
                yield pending.popleft().result()
                for batch in itertools.islice(batches, 1):
                    pending.append(pool.submit(_encode_in_worker, batch))
        finally:
            pool.shutdown(cancel_futures=True)  # and waits: an end that overlaps with Python's may raise
