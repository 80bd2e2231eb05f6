"""tools/preprocess_data.py writes what it read, the same with any number of workers, and nothing after a mistake."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron.training.data import text as text_module
from megatron.training.tokenizer import TokenizerRequest, build_tokenizer

TOOL = Path(__file__).resolve().parents[3] / "tools" / "preprocess_data.py"
BYTES = ["--tokenizer-type", "ByteLevelTokenizer"]
TEXTS = ["plain", "naïve 東京 🚀", "tab\there\nand a second line ", "\u0000\u0001", "x" * 300]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("preprocess_data", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def write_json_lines(path: Path, records: list, end: str = "\n") -> Path:
    path.write_text("".join(json.dumps(record) + end for record in records), encoding="utf-8")
    return path


def read_back(prefix: Path) -> list[list[int]]:
    indexed = IndexedDataset(str(prefix))
    assert list(indexed.document_indices) == list(range(len(indexed) + 1))
    return [indexed[index].tolist() for index in range(len(indexed))]


def arguments(source: Path, prefix: Path, *more: str) -> list[str]:
    return ["--input", str(source), "--output-prefix", str(prefix), "--log-interval", "0", *BYTES, *more]


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_json_lines_come_back_as_the_same_text(tool, tmp_path, capsys):
    source = write_json_lines(tmp_path / "corpus.jsonl", [{"text": text} for text in TEXTS], end="\r\n\n")
    assert tool.main(arguments(source, tmp_path / "out" / "corpus", "--append-eod")) == 0
    documents = read_back(tmp_path / "out" / "corpus_text_document")
    tokenizer = build_tokenizer(TokenizerRequest(tokenizer_type="ByteLevelTokenizer"))
    assert [document[-1] for document in documents] == [tokenizer.eod] * len(TEXTS)
    assert [tokenizer.detokenize(document) for document in documents] == TEXTS
    assert files_in(tmp_path / "out") == ["corpus_text_document.bin", "corpus_text_document.idx"]
    assert f"--data-path {tmp_path}/out/corpus_text_document" in capsys.readouterr().out


def test_workers_do_not_change_a_byte(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(text_module, "BATCH_DOCUMENTS", 7)
    records = [{"text": f"{index} " * (index % 40)} for index in range(400)]
    source = write_json_lines(tmp_path / "corpus.jsonl", records)
    for workers in ("1", "3"):
        assert tool.main(arguments(source, tmp_path / workers, "--workers", workers, "--append-eod")) == 0
    for suffix in (".bin", ".idx"):
        alone, together = (tmp_path / f"{workers}_text_document{suffix}" for workers in ("1", "3"))
        assert alone.read_bytes() == together.read_bytes()
    assert len(read_back(tmp_path / "3_text_document")) == 390, "documents without text are left out"


def test_every_key_has_its_own_output(tool, tmp_path):
    source = write_json_lines(tmp_path / "a.json", [{"title": "t1", "text": "one"}, {"title": "", "text": "two"}])
    assert tool.main(arguments(source, tmp_path / "out", "--json-keys", "text", "title")) == 0
    assert [bytes(document) for document in read_back(tmp_path / "out_text_document")] == [b"one", b"two"]
    assert [bytes(document) for document in read_back(tmp_path / "out_title_document")] == [b"t1"]


def test_plain_text_files_folders_and_patterns(tool, tmp_path):
    corpus = tmp_path / "corpus"
    (corpus / "deep").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "deep/c.py", "deep/d.md"):
        (corpus / name).write_text(f"{name}\n")
    patterns = [str(corpus / "b.txt"), str(corpus / "**" / "*.py"), str(corpus)]
    command = ["--output-prefix", str(tmp_path / "out"), *BYTES]
    assert tool.main(["--input", *patterns, *command]) == 0
    documents = [bytes(document).decode() for document in read_back(tmp_path / "out_text_document")]
    assert documents == ["b.txt\n", "deep/c.py\n", "a.txt\n", "deep/d.md\n"], "in the order given, none twice"


def test_lines_as_documents(tool, tmp_path):
    (tmp_path / "a.txt").write_text("one\n\n two \r\nthree", newline="")
    assert tool.main(arguments(tmp_path / "a.txt", tmp_path / "out", "--lines-as-documents")) == 0
    assert [bytes(document) for document in read_back(tmp_path / "out_text_document")] == [b"one", b" two ", b"three"]


def test_text_that_is_not_utf8(tool, tmp_path, capsys):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "bad.txt").write_bytes(b"caf\xe9")
    (folder / "bom.txt").write_bytes(b"\xef\xbb\xbfgood")
    assert tool.main(arguments(folder, tmp_path / "out")) == 1
    assert f"{folder}/bad.txt: not UTF-8" in capsys.readouterr().err
    assert tool.main(arguments(folder, tmp_path / "out", "--skip-undecodable")) == 0
    assert [bytes(document) for document in read_back(tmp_path / "out_text_document")] == [b"good"]
    assert "1 empty texts left out" in capsys.readouterr().out


def test_half_characters_of_json_become_replacement_characters(tool, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud83d!"}\n')
    assert tool.main(arguments(tmp_path / "a.jsonl", tmp_path / "out")) == 0
    assert bytes(read_back(tmp_path / "out_text_document")[0]).decode() == "a\ufffd!"


@pytest.mark.parametrize(
    ("content", "more", "said"),
    [
        ('{"text": "a"}\n{"text": \n', [], "corpus.jsonl:2: not a JSON value"),
        ('{"text": "a"}\n{"body": "b"}\n', [], "corpus.jsonl:2: no key 'text'; the keys are 'body'"),
        ('{"text": "a"}\n{"text": 5}\n', ["--workers", "2"], "corpus.jsonl:2: the value of 'text' must be text"),
        ('["text"]\n', [], "corpus.jsonl:1: expected a JSON object"),
        ('{"text": ""}\n', [], "would be empty: 1 documents"),
        ("\n\n", [], "would be empty: 0 documents"),
        ("text", ["--input-format", "text", "--json-keys", "body"], "--json-keys leaves out"),
        ('{"text": "1 2 9"}', ["--tokenizer-type", "NullTokenizer", "--vocab-size", "8"], "corpus.jsonl:1: NullTok"),
        ('{"text": "a"}', ["--tokenizer-type", "HuggingFaceTokenizer"], "needs --tokenizer-model"),
    ],
)
def test_mistakes_say_where_and_leave_no_output(tool, tmp_path, capsys, content, more, said):
    (tmp_path / "corpus.jsonl").write_text(content)
    assert tool.main(arguments(tmp_path / "corpus.jsonl", tmp_path / "out", *more)) == 1
    assert said in capsys.readouterr().err
    assert files_in(tmp_path) == ["corpus.jsonl"]


def test_a_broken_run_keeps_the_output_of_the_one_before(tool, tmp_path):
    source = write_json_lines(tmp_path / "corpus.jsonl", [{"text": "first"}])
    assert tool.main(arguments(source, tmp_path / "out")) == 0
    source.write_text('{"text": "second"}\nbroken\n')
    assert tool.main(arguments(source, tmp_path / "out")) == 1
    assert bytes(read_back(tmp_path / "out_text_document")[0]) == b"first"


def test_missing_input_and_bad_flags(tool, tmp_path, capsys):
    for missing in ("nowhere.jsonl", "*.none"):
        assert tool.main(arguments(tmp_path / missing, tmp_path / "out")) == 1
        assert f"{missing}: no such file" in capsys.readouterr().err
    for flags in (["--split-sentences"], ["--workers", "0"], ["--work", "2"]):
        with pytest.raises(SystemExit):
            tool.main(arguments(tmp_path, tmp_path / "out", *flags))
        assert flags[0] in capsys.readouterr().err


def test_small_vocabularies_take_two_bytes_and_large_ones_four(tool, tmp_path):
    source = write_json_lines(tmp_path / "corpus.jsonl", [{"text": "7 8"}])
    for vocab_size, dtype in (("65000", numpy.uint16), ("70000", numpy.int32)):
        prefix = tmp_path / vocab_size
        null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", vocab_size]
        assert tool.main(arguments(source, prefix, *null)) == 0
        assert IndexedDataset(f"{prefix}_text_document").index.dtype == dtype


def test_the_script_runs_and_reports_progress(tmp_path):
    source = write_json_lines(tmp_path / "corpus.jsonl", [{"text": "abc"}] * 2500)
    command = [sys.executable, str(TOOL), *arguments(source, tmp_path / "out", "--workers", "2")]
    paths = os.pathsep.join([str(TOOL.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths}
    command += ["--log-interval", "1000"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert result.returncode == 0, result.stderr
    progress = [line for line in result.stderr.splitlines() if line.startswith("processed ")]
    assert [line.split()[1] for line in progress] == ["1000", "2000"]
    assert "docs/s" in progress[0] and "MB/s" in progress[0]
    assert len(result.stderr.splitlines()) == 2, "nothing else is said, as by megatron-core's imports"
    assert "2500 documents read, 7500 tokens" in result.stdout


def test_workers_have_ended_when_the_tool_has(tool, tmp_path, monkeypatch):
    """One that had not printed a traceback now and then, as Python ended."""
    waits = []
    shutdown = text_module.ProcessPoolExecutor.shutdown

    def noted(pool, wait=True, *, cancel_futures=False):
        waits.append(wait)
        shutdown(pool, wait, cancel_futures=cancel_futures)

    monkeypatch.setattr(text_module.ProcessPoolExecutor, "shutdown", noted)
    source = write_json_lines(tmp_path / "corpus.jsonl", [{"text": "abc"}] * 3)
    assert tool.main(arguments(source, tmp_path / "out", "--workers", "2")) == 0
    assert waits and all(waits)


def test_options_and_models_that_are_not_there_are_one_line(tool, tmp_path, capsys):
    source = write_json_lines(tmp_path / "corpus.jsonl", [{"text": "abc"}])
    with pytest.raises(SystemExit):
        tool.main(arguments(source, tmp_path / "out", "--append-eos"))
    assert "unrecognized arguments: --append-eos; did you mean --append-eod?" in capsys.readouterr().err
    pytest.importorskip("sentencepiece")
    model = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(source)]
    assert tool.main(["--input", str(source), "--output-prefix", str(tmp_path / "out"), *model]) == 1
    told = capsys.readouterr().err.splitlines()
    assert told[-1].startswith(f"preprocess_data: error: {source}: no tokenizer that sentencepiece can read (")
