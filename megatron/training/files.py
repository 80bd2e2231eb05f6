"""Files and folders that a run names: whether they are there, and can be written, before anything is built."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.training.config import RunConfig
from megatron.training.config.flags import is_number


def missing_files(config: RunConfig) -> Iterator[str]:
    """A sentence for each prefix of data that is to be read and has no files."""
    data, validation = config.data, config.validation
    trains, evaluates = not validation.skip_train, validation.eval_iters > 0
    for flag, words, is_read in (
        ("--data-path", data.data_path, True),
        ("--train-data-path", data.train_data_path, trains),
        ("--valid-data-path", data.valid_data_path, evaluates),
        ("--test-data-path", data.test_data_path, evaluates),
    ):
        for prefix in _prefixes(words or ()) if is_read else ():
            missing = [path for path in (f"{prefix}.idx", f"{prefix}.bin") if not Path(path).exists()]
            if missing:
                yield f"{flag} {prefix}: {missing[0]} does not exist; make it with tools/preprocess_data.py"


def _prefixes(words: Sequence[str]) -> Sequence[str]:
    """Without the weights, which every second word is, from the first on, or none."""
    has_weights = len(words) % 2 == 0 and all(map(is_number, words[::2]))
    return words[1::2] if has_weights else words


def make_output_folders(config: RunConfig) -> None:
    """Makes the folders that the run will write to. Raises ValueError with the first that cannot be written."""
    for flag, folder in (
        ("--save", config.checkpoint.save),
        ("--tensorboard-dir", config.logger.tensorboard_dir),
        ("--data-cache-path", config.data.data_cache_path),
    ):
        if folder is None:
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ValueError(f"{flag} {folder} cannot be written: {error.strerror}") from error
