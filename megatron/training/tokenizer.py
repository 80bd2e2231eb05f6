"""Text to token ids and back, from files on disk only, with Megatron-LM's tokenizer names and ids.

Nothing here imports torch or megatron-core, because every worker of tools/preprocess_data.py imports this file.
megatron-core's own wrappers are not used for reading text: its byte-level and tiktoken classes do not give the text
back exactly, and its GPT-2 one downloads.
"""

import base64
import contextlib
import difflib
import importlib
import json
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

NO_PAD = -1
"""The pad id of a tokenizer that has none; megatron-core's datasets mask nothing then."""

_EXTRA_OF_PACKAGE = {
    "transformers": "hf",
    "tokenizers": "hf",
    "sentencepiece": "tokenizers",
    "tiktoken": "tokenizers",
}
_USUAL_EOD_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "[EOS]")
_TIKTOKEN_DEFAULT_PATTERN = "v2"
_PADDING_OPTIONS = frozenset({"make_vocab_size_divisible_by", "tensor_model_parallel_size", "padded_vocab_size"})
_OPTIONS_OF_SOME_TYPES = ("tokenizer_model", "vocab_file", "merge_file", "tokenizer_special_tokens", "tiktoken_pattern")


@dataclass(frozen=True, kw_only=True)
class TokenizerRequest:
    """Options of the tokenizer to build, under Megatron-LM's names."""

    tokenizer_type: str
    """A key of TOKENIZER_TYPES."""

    tokenizer_model: str | Path | None = None
    """File or directory with the tokenizer; nothing is ever downloaded."""

    vocab_file: str | Path | None = None
    """GPT2BPETokenizer's vocabulary (JSON)."""

    merge_file: str | Path | None = None
    """GPT2BPETokenizer's merges (text)."""

    vocab_size: int | None = None
    """NullTokenizer: ids before the end-of-document id. TikTokenizer: ids in all. Others: checked against the files."""

    make_vocab_size_divisible_by: int = 128
    """The padded size is a multiple of this times the tensor-parallel size."""

    tensor_model_parallel_size: int = 1
    """Ranks that share the embedding's rows."""

    padded_vocab_size: int | None = None
    """The padded size itself, instead of the multiple."""

    tokenizer_special_tokens: tuple[str, ...] | None = None
    """HuggingFaceTokenizer: tokens to add. TikTokenizer: the first special ids instead of the usual seven."""

    tokenizer_hf_no_include_special_tokens: bool = False
    """HuggingFaceTokenizer: leave out the tokens that the tokenizer itself puts around a text."""

    tiktoken_pattern: str | None = None
    """TikTokenizer's splitting pattern, v1 or v2 (the default)."""

    tiktoken_num_special_tokens: int = 1000
    """TikTokenizer: ids kept for special tokens, in front of the vocabulary."""


class Tokenizer(ABC):
    """Interface of a tokenizer for training and megatron-core's datasets."""

    options: frozenset[str] = frozenset()
    """Those of the options which not every type has that this type uses."""

    def __init__(self, request: TokenizerRequest, *, vocab_size: int, eod: int, pad: int = NO_PAD) -> None:
        self.vocab_size = vocab_size
        """Number of ids, `eod` included."""
        self.eod = eod
        """Id that ends a document."""
        # A pad id that is also the end of documents would mask every document's end in the loss.
        self.pad = NO_PAD if pad == eod else pad
        """Id that the datasets mask, or NO_PAD."""
        self.padded_vocab_size = _padded_vocab_size(request, vocab_size)
        """Rows of the embedding."""
        self.unique_identifiers = _identity(request)
        """Names this tokenizer in the keys of the datasets' index cache."""

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Ids of `text`, without an end-of-document id."""

    @abstractmethod
    def detokenize(self, ids: Iterable[int]) -> str:
        """Text of `ids`."""


def build_tokenizer(request: TokenizerRequest) -> Tokenizer:
    """The requested tokenizer; ValueError says which option is missing or wrong."""
    build = TOKENIZER_TYPES.get(request.tokenizer_type)
    if build is None:
        near = difflib.get_close_matches(str(request.tokenizer_type), TOKENIZER_TYPES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(
            f"--tokenizer-type is {request.tokenizer_type!r}; expected one of {', '.join(TOKENIZER_TYPES)}{hint}"
        )
    for option in _OPTIONS_OF_SOME_TYPES:
        if getattr(request, option) is not None and option not in build.options:
            raise ValueError(f"{request.tokenizer_type} has no use for --{option.replace('_', '-')}; leave it out")
    return build(request)


class NullTokenizer(Tokenizer):
    """Text that already is ids: "17 4 250". Vocabulary of `--vocab-size` ids and one more for the end of documents."""

    def __init__(self, request: TokenizerRequest) -> None:
        if request.vocab_size is None or request.vocab_size < 1:
            raise ValueError(f"NullTokenizer needs --vocab-size of at least 1; got {request.vocab_size}")
        super().__init__(request, vocab_size=request.vocab_size + 1, eod=request.vocab_size)

    def tokenize(self, text: str) -> list[int]:
        ids = [_integer(word) for word in text.split()]
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"NullTokenizer reads ids from 0 to {self.vocab_size - 1}; got {token}")
        return ids

    def detokenize(self, ids: Iterable[int]) -> str:
        return " ".join(str(int(token)) for token in ids)


class ByteLevelTokenizer(Tokenizer):
    """Each byte of the UTF-8 text is an id; 256 ends a document."""

    def __init__(self, request: TokenizerRequest) -> None:
        super().__init__(request, vocab_size=257, eod=256)
        _check_vocab_size(request, self.vocab_size)

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def detokenize(self, ids: Iterable[int]) -> str:
        # A window of ids may start or end inside a character: such bytes show as U+FFFD.
        return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer saved by `transformers` (a directory) or by `tokenizers` (one tokenizer.json)."""

    options = frozenset({"tokenizer_model", "tokenizer_special_tokens"})

    def __init__(self, request: TokenizerRequest) -> None:
        path = _existing_path(request, "tokenizer_model")
        transformers = _require("transformers", request)
        with _readable_by("transformers", path):
            if path.is_dir():
                library = transformers.AutoTokenizer.from_pretrained(str(path), local_files_only=True)
            else:
                library = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
        if request.tokenizer_special_tokens:
            library.add_tokens(list(request.tokenizer_special_tokens), special_tokens=True)
        self._library = library
        self._adds_special_tokens = not request.tokenizer_hf_no_include_special_tokens
        pad = NO_PAD if library.pad_token_id is None else library.pad_token_id
        super().__init__(request, vocab_size=len(library), eod=_hugging_face_eod(library, path), pad=pad)
        _check_vocab_size(request, self.vocab_size)

    def tokenize(self, text: str) -> list[int]:
        # verbose=False: a document longer than the model's context is normal here and not worth a warning.
        return self._library.encode(text, add_special_tokens=self._adds_special_tokens, verbose=False)

    def detokenize(self, ids: Iterable[int]) -> str:
        return self._library.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model file; its end-of-sentence piece ends documents."""

    options = frozenset({"tokenizer_model"})

    def __init__(self, request: TokenizerRequest) -> None:
        path = _existing_path(request, "tokenizer_model")
        sentencepiece = _require("sentencepiece", request)
        with _readable_by("sentencepiece", path):
            self._library = sentencepiece.SentencePieceProcessor(model_file=str(path))
        eod = self._library.eos_id()
        if eod < 0:
            raise ValueError(
                f"{path} has no end-of-sentence piece to end documents with; train the model with eos_id set"
            )
        pad = self._library.pad_id()
        super().__init__(request, vocab_size=self._library.get_piece_size(), eod=eod, pad=pad if pad >= 0 else NO_PAD)
        _check_vocab_size(request, self.vocab_size)

    def tokenize(self, text: str) -> list[int]:
        return self._library.encode(text)

    def detokenize(self, ids: Iterable[int]) -> str:
        return self._library.decode([int(token) for token in ids])


class GPT2BPETokenizer(Tokenizer):
    """GPT-2's byte-level BPE from its vocabulary and merges files; <|endoftext|> ends documents."""

    options = frozenset({"vocab_file", "merge_file"})

    def __init__(self, request: TokenizerRequest) -> None:
        vocab, merges = _existing_path(request, "vocab_file"), _existing_path(request, "merge_file")
        tokenizers = _require("tokenizers", request)
        with _readable_by("tokenizers", vocab, merges):
            library = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(vocab), str(merges)))
        library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = tokenizers.decoders.ByteLevel()
        self._library = library
        eod = library.token_to_id("<|endoftext|>")
        if eod is None:
            raise ValueError(f"{vocab} has no <|endoftext|>, with which GPT2BPETokenizer ends documents")
        super().__init__(request, vocab_size=library.get_vocab_size(), eod=eod)
        _check_vocab_size(request, self.vocab_size)

    def tokenize(self, text: str) -> list[int]:
        return self._library.encode(text).ids

    def detokenize(self, ids: Iterable[int]) -> str:
        return self._library.decode(list(ids))


class TikTokenizer(Tokenizer):
    """A tiktoken vocabulary behind a block of special ids, laid out as megatron-core does."""

    options = frozenset({"tokenizer_model", "tokenizer_special_tokens", "tiktoken_pattern"})

    def __init__(self, request: TokenizerRequest) -> None:
        path = _existing_path(request, "tokenizer_model")
        tiktoken = _require("tiktoken", request)
        # megatron-core owns the patterns and the special ids that Megatron's models were trained with.
        layout = importlib.import_module("megatron.core.tokenizers.text.libraries.tiktoken_tokenizer")
        patterns = {"v1": layout._PATTERN_TIKTOKEN_V1, "v2": layout._PATTERN_TIKTOKEN_V2}
        pattern = request.tiktoken_pattern or _TIKTOKEN_DEFAULT_PATTERN
        if pattern not in patterns:
            raise ValueError(f"--tiktoken-pattern is {pattern!r}; expected one of {', '.join(patterns)}")
        specials = _tiktoken_specials(request, layout)
        tokens = _read_tiktoken_vocabulary(path)
        vocab_size = request.vocab_size or min(layout.DEFAULT_TIKTOKEN_MAX_VOCAB, len(specials) + len(tokens))
        wanted = vocab_size - len(specials)
        if not 256 <= wanted <= len(tokens):
            raise ValueError(
                f"--vocab-size {vocab_size} less {len(specials)} special ids leaves {wanted} ids for {path}, "
                f"which has {len(tokens)}; expected at least 256. Change --vocab-size or --tiktoken-num-special-tokens"
            )
        self._library = tiktoken.Encoding(
            name=path.stem,
            pat_str=patterns[pattern],
            mergeable_ranks={token: len(specials) + rank for rank, token in enumerate(tokens[:wanted])},
            special_tokens={token: index for index, token in enumerate(specials)},
        )
        super().__init__(request, vocab_size=vocab_size, eod=specials.index("</s>"), pad=specials.index("<pad>"))

    def tokenize(self, text: str) -> list[int]:
        return self._library.encode(text, allowed_special="all")

    def detokenize(self, ids: Iterable[int]) -> str:
        return self._library.decode([int(token) for token in ids])


TOKENIZER_TYPES: dict[str, type[Tokenizer]] = {
    "NullTokenizer": NullTokenizer,
    "ByteLevelTokenizer": ByteLevelTokenizer,
    "HuggingFaceTokenizer": HuggingFaceTokenizer,
    "SentencePieceTokenizer": SentencePieceTokenizer,
    "GPTSentencePieceTokenizer": SentencePieceTokenizer,
    "Llama2Tokenizer": SentencePieceTokenizer,
    "TikTokenizer": TikTokenizer,
    "GPT2BPETokenizer": GPT2BPETokenizer,
}
"""Values of --tokenizer-type."""


def _padded_vocab_size(request: TokenizerRequest, vocab_size: int) -> int:
    multiple = request.make_vocab_size_divisible_by * request.tensor_model_parallel_size
    if multiple < 1:
        raise ValueError(
            f"--make-vocab-size-divisible-by times the tensor-parallel size must be at least 1; got {multiple}"
        )
    if request.padded_vocab_size is None:
        return -(-vocab_size // multiple) * multiple
    if request.padded_vocab_size < vocab_size or request.padded_vocab_size % request.tensor_model_parallel_size:
        raise ValueError(
            f"--padded-vocab-size is {request.padded_vocab_size}; expected at least the tokenizer's {vocab_size} ids "
            f"and a multiple of the tensor-parallel size {request.tensor_model_parallel_size}"
        )
    return request.padded_vocab_size


def _identity(request: TokenizerRequest) -> OrderedDict[str, str]:
    """Everything that changes which ids a text becomes, as strings."""
    names = [field.name for field in fields(request) if field.name not in _PADDING_OPTIONS]
    return OrderedDict((name, str(value)) for name in names if (value := getattr(request, name)) is not None)


def _check_vocab_size(request: TokenizerRequest, vocab_size: int) -> None:
    if request.vocab_size is not None and request.vocab_size != vocab_size:
        raise ValueError(
            f"--vocab-size is {request.vocab_size}, but this {request.tokenizer_type} has {vocab_size} ids; "
            "leave --vocab-size out (--padded-vocab-size sets the embedding's rows)"
        )


def _existing_path(request: TokenizerRequest, option: str) -> Path:
    value = getattr(request, option)
    flag = "--" + option.replace("_", "-")
    if value is None:
        raise ValueError(f"{request.tokenizer_type} needs {flag}")
    path = Path(value)
    if not path.exists():
        raise ValueError(
            f"{flag} is {str(value)!r}, which does not exist; tokenizers are read from disk, never downloaded"
        )
    return path


@contextlib.contextmanager
def _readable_by(package: str, *paths: Path) -> Iterator[None]:
    """Turns whatever a library raises for a file that it cannot parse into one sentence."""
    try:
        yield
    except Exception as error:  # the libraries have no common class
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        names = " and ".join(map(str, paths))
        raise ValueError(f"{names}: no tokenizer that {package} can read ({reason})") from error


def _require(package: str, request: TokenizerRequest) -> ModuleType:
    """The optional package, or an error that says how to get it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        extra = _EXTRA_OF_PACKAGE[package]
        raise ImportError(
            f"{request.tokenizer_type} needs the package {package}: pip install {package} (or 'megatron-fsdp[{extra}]')"
        ) from error


def _integer(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"NullTokenizer reads integers separated by spaces; got {word[:40]!r}") from None


def _hugging_face_eod(library: Any, path: Path) -> int:
    """The end-of-document id; a bare tokenizer.json does not say which it is, so the usual spellings are looked up."""
    if library.eos_token_id is not None:
        return library.eos_token_id
    vocabulary = library.get_vocab()
    for token in _USUAL_EOD_TOKENS:
        if token in vocabulary:
            return vocabulary[token]
    raise ValueError(
        f"{path} names no end-of-sequence token and has none of {', '.join(_USUAL_EOD_TOKENS)}; "
        "set eos_token in tokenizer_config.json and give the directory"
    )


def _tiktoken_specials(request: TokenizerRequest, layout: ModuleType) -> list[str]:
    specials = list(request.tokenizer_special_tokens or layout.SPECIAL_TOKENS)
    missing = [token for token in layout.SPECIAL_TOKENS if token not in specials]
    count = request.tiktoken_num_special_tokens
    if missing or len(set(specials)) != len(specials) or len(specials) > count:
        raise ValueError(
            f"--tokenizer-special-tokens must be at most {count} different tokens, "
            f"{', '.join(layout.SPECIAL_TOKENS)} among them; got {specials}"
        )
    return specials + [layout.SPECIAL_TOKEN_TEMPLATE.format(id=index) for index in range(len(specials), count)]


def _read_tiktoken_vocabulary(path: Path) -> list[bytes]:
    """Token bytes by rank, from megatron-core's JSON list or from tiktoken's own lines `base64 rank`."""
    text = path.read_text(encoding="utf-8")
    try:
        if path.suffix == ".json":
            pairs = [(entry["token_bytes"], entry["rank"]) for entry in json.loads(text)]
        else:
            pairs = [tuple(line.split()) for line in text.splitlines() if line.strip()]
        tokens = {int(rank): base64.b64decode(token, validate=True) for token, rank in pairs}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is neither a JSON list of token_bytes and rank nor lines of base64 and rank: {error!r}"
        ) from error
    if sorted(tokens) != list(range(len(tokens))):
        raise ValueError(f"{path}: the {len(tokens)} ranks must be 0 to {len(tokens) - 1}, each once")
    return [tokens[rank] for rank in range(len(tokens))]
