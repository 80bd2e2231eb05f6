"""Tokenizers give back the text they read, with Megatron-LM's ids and vocabulary sizes, from files made here."""

import base64
import json
import pickle
import sys
from pathlib import Path

import pytest

from megatron.training.tokenizer import NO_PAD, TOKENIZER_TYPES, TokenizerRequest, build_tokenizer

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "naïve café, Ωmega, 東京タワー, 🚀 and more",
    "def f(x):\n\treturn x ** 2  # two  spaces\n",
    "Пример текста на русском языке.",
]
UNICODE = "a naïve 東京 🚀\tΩ  two spaces\n\nend \x00\x01 "


def request(tokenizer_type: str, **options) -> TokenizerRequest:
    return TokenizerRequest(tokenizer_type=tokenizer_type, **options)


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory) -> Path:
    trainer = pytest.importorskip("sentencepiece").SentencePieceTrainer
    prefix = tmp_path_factory.mktemp("spm") / "tiny"
    trainer.train(
        sentence_iterator=iter(SENTENCES * 5),
        model_prefix=str(prefix),
        vocab_size=400,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        model_type="bpe",
        minloglevel=2,
    )
    return prefix.with_suffix(".model")


@pytest.fixture(scope="module")
def bpe_files(tmp_path_factory) -> Path:
    """A folder with vocab.json, merges.txt and tokenizer.json of one byte-level BPE."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("bpe")
    library = tokenizers.ByteLevelBPETokenizer()
    library.train_from_iterator(SENTENCES * 5, vocab_size=400, min_frequency=1, special_tokens=["<|endoftext|>"])
    library.save_model(str(folder))
    library.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def tiktoken_lines(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tiktoken") / "tiny.tiktoken"
    tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" q", "é".encode()]
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)))
    return path


@pytest.fixture
def tiktoken_json(tiktoken_lines, tmp_path) -> Path:
    path = tmp_path / "tiny.json"
    pairs = [line.split() for line in tiktoken_lines.read_text().splitlines()]
    path.write_text(json.dumps([{"rank": int(r), "token_bytes": t, "token_str": None} for t, r in pairs]))
    return path


def test_null_tokenizer_adds_its_end_of_document_after_the_vocabulary():
    tokenizer = build_tokenizer(request("NullTokenizer", vocab_size=31999))
    assert (tokenizer.vocab_size, tokenizer.padded_vocab_size, tokenizer.eod) == (32000, 32000, 31999)
    assert tokenizer.tokenize("3 1  4\n") == [3, 1, 4]
    assert tokenizer.detokenize([3, 1, 4]) == "3 1 4"
    for text, said in (("3 x", "integers"), ("32000", "0 to 31999"), ("-1", "0 to 31999")):
        with pytest.raises(ValueError, match=said):
            tokenizer.tokenize(text)
    with pytest.raises(ValueError, match="--vocab-size"):
        build_tokenizer(request("NullTokenizer"))


def test_byte_level_gives_back_every_text():
    tokenizer = build_tokenizer(request("ByteLevelTokenizer"))
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad, tokenizer.padded_vocab_size) == (257, 256, NO_PAD, 384)
    assert tokenizer.detokenize([*tokenizer.tokenize(UNICODE), tokenizer.eod]) == UNICODE
    assert tokenizer.tokenize("é") == [0xC3, 0xA9]
    assert tokenizer.detokenize([0xA9, 65]) == "\ufffdA"


@pytest.mark.parametrize("tokenizer_type", ["SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"])
def test_sentencepiece_model_file(sentencepiece_model, tokenizer_type):
    tokenizer = build_tokenizer(request(tokenizer_type, tokenizer_model=sentencepiece_model))
    text = UNICODE.replace("\x00", "")
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    assert tokenizer.eod == 2 and tokenizer.pad == NO_PAD
    assert max(tokenizer.tokenize(text)) < tokenizer.vocab_size <= tokenizer.padded_vocab_size


def test_gpt2_bpe_from_vocabulary_and_merges(bpe_files):
    tokenizer = build_tokenizer(
        request("GPT2BPETokenizer", vocab_file=bpe_files / "vocab.json", merge_file=bpe_files / "merges.txt")
    )
    assert tokenizer.detokenize(tokenizer.tokenize(UNICODE)) == UNICODE
    assert tokenizer.eod == 0 and tokenizer.eod not in tokenizer.tokenize("a <|endoftext|> in the text is text")
    assert len(tokenizer.tokenize("The quick brown fox")) < 10


def test_hugging_face_directory_and_file_give_the_same_ids(bpe_files, tmp_path):
    transformers = pytest.importorskip("transformers")
    saved = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(bpe_files / "tokenizer.json"), eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    saved.save_pretrained(tmp_path / "saved")
    directory = build_tokenizer(request("HuggingFaceTokenizer", tokenizer_model=tmp_path / "saved"))
    file = build_tokenizer(request("HuggingFaceTokenizer", tokenizer_model=bpe_files / "tokenizer.json"))
    assert directory.tokenize(UNICODE) == file.tokenize(UNICODE)
    assert directory.detokenize(directory.tokenize(UNICODE)) == UNICODE
    assert directory.eod == file.eod == 0
    assert directory.pad == NO_PAD, "a pad id equal to the end of documents would mask it"
    assert directory.vocab_size == file.vocab_size == len(saved)


def test_hugging_face_adds_its_own_special_tokens_unless_told_not_to(bpe_files, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    library = tokenizers.Tokenizer.from_file(str(bpe_files / "tokenizer.json"))
    library.post_processor = tokenizers.processors.TemplateProcessing("<|endoftext|> $A", None, [("<|endoftext|>", 0)])
    library.save(str(tmp_path / "tokenizer.json"))
    options = {"tokenizer_model": tmp_path / "tokenizer.json", "tokenizer_special_tokens": ("<extra>",)}
    tokenizer = build_tokenizer(request("HuggingFaceTokenizer", **options))
    bare = build_tokenizer(request("HuggingFaceTokenizer", tokenizer_hf_no_include_special_tokens=True, **options))
    assert tokenizer.tokenize("fox") == [0, *bare.tokenize("fox")]
    assert bare.tokenize("<extra>") == [bare.vocab_size - 1]
    assert tokenizer.detokenize(tokenizer.tokenize("fox")) == "fox"


def test_tiktoken_lines_and_json_give_the_same_ids(tiktoken_lines, tiktoken_json):
    options = {"tiktoken_num_special_tokens": 10}
    tokenizer = build_tokenizer(request("TikTokenizer", tokenizer_model=tiktoken_lines, **options))
    from_json = build_tokenizer(request("TikTokenizer", tokenizer_model=tiktoken_json, **options))
    assert tokenizer.tokenize(UNICODE) == from_json.tokenize(UNICODE)
    assert tokenizer.detokenize(tokenizer.tokenize(UNICODE)) == UNICODE
    assert tokenizer.tokenize("theé") == [10 + 257, 10 + 259]
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (270, 2, 4)
    cut = build_tokenizer(request("TikTokenizer", tokenizer_model=tiktoken_lines, vocab_size=267, **options))
    assert cut.vocab_size == 267 and cut.tokenize("the") == [10 + 256, 10 + ord("e")]


def test_tiktoken_mistakes_are_named(tiktoken_lines, tmp_path):
    for options, said in (
        ({"vocab_size": 2000}, "leaves 1000 ids"),
        ({"tiktoken_pattern": "v9"}, "--tiktoken-pattern"),
        ({"tokenizer_special_tokens": ("<s>",)}, "<unk>"),
    ):
        with pytest.raises(ValueError, match=said):
            build_tokenizer(request("TikTokenizer", tokenizer_model=tiktoken_lines, **options))
    (tmp_path / "bad.tiktoken").write_text("not base64!\n")
    with pytest.raises(ValueError, match="neither"):
        build_tokenizer(request("TikTokenizer", tokenizer_model=tmp_path / "bad.tiktoken"))


@pytest.mark.parametrize(
    ("options", "padded"),
    [
        ({}, 384),
        ({"make_vocab_size_divisible_by": 1}, 257),
        ({"make_vocab_size_divisible_by": 64, "tensor_model_parallel_size": 8}, 512),
        ({"padded_vocab_size": 300, "tensor_model_parallel_size": 2}, 300),
    ],
)
def test_padded_vocabulary(options, padded):
    assert build_tokenizer(request("ByteLevelTokenizer", **options)).padded_vocab_size == padded


def test_user_mistakes_name_the_option(tmp_path):
    for tokenizer, said in (
        (request("HugingFaceTokenizer"), "did you mean HuggingFaceTokenizer"),
        (request("HuggingFaceTokenizer"), "needs --tokenizer-model"),
        (request("HuggingFaceTokenizer", tokenizer_model="gpt2"), "never downloaded"),
        (request("GPT2BPETokenizer", vocab_file=tmp_path), "--merge-file"),
        (request("ByteLevelTokenizer", vocab_size=512), "has 257 ids"),
        (request("ByteLevelTokenizer", tokenizer_model="x"), "no use for --tokenizer-model"),
        (request("ByteLevelTokenizer", padded_vocab_size=256), "--padded-vocab-size"),
        (request("ByteLevelTokenizer", make_vocab_size_divisible_by=0), "--make-vocab-size-divisible-by"),
    ):
        with pytest.raises(ValueError, match=said):
            build_tokenizer(tokenizer)


def test_a_missing_package_says_what_to_install(monkeypatch, tmp_path):
    (tmp_path / "tiny.model").touch()
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ImportError, match=r"pip install sentencepiece \(or 'megatron-fsdp\[tokenizers\]'\)"):
        build_tokenizer(request("SentencePieceTokenizer", tokenizer_model=tmp_path / "tiny.model"))


def test_every_tokenizer_travels_to_another_process(sentencepiece_model, bpe_files, tiktoken_lines):
    bpe = {"vocab_file": bpe_files / "vocab.json", "merge_file": bpe_files / "merges.txt"}
    files = {"SentencePieceTokenizer": {"tokenizer_model": sentencepiece_model}, "GPT2BPETokenizer": bpe}
    files["GPTSentencePieceTokenizer"] = files["Llama2Tokenizer"] = files["SentencePieceTokenizer"]
    files["HuggingFaceTokenizer"] = {"tokenizer_model": bpe_files / "tokenizer.json"}
    files["TikTokenizer"] = {"tokenizer_model": tiktoken_lines}
    files["NullTokenizer"] = {"vocab_size": 10}
    for name in TOKENIZER_TYPES:
        tokenizer = build_tokenizer(request(name, **files.get(name, {})))
        copy = pickle.loads(pickle.dumps(tokenizer))
        assert copy.tokenize("7") == tokenizer.tokenize("7")
        assert json.loads(json.dumps(tokenizer.unique_identifiers))["tokenizer_type"] == name
