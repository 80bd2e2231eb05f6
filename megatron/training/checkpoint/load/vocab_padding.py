"""Tables of the vocabulary may be padded otherwise than the saved ones; every id of the tokenizer has rows in both."""

from collections.abc import Mapping
from typing import Any

from torch.distributed.tensor import DTensor

from megatron.training.checkpoint.load.match_keys import ROWS_OF_VOCABULARY, STATE, Stored
from megatron_fsdp.dtensor.chunk_metadata import with_rows


def with_saved_rows(leaves: Mapping[str, Any], stored: Stored, vocab_size: int) -> dict[str, Any]:
    """`leaves`, where tables of the vocabulary have as many rows as in the checkpoint, of which every id has one.

    They share memory with the run's tables; rows of padding that the checkpoint lacks are not in them, and keep their
    values. A checkpoint without a row for every id is left as it is, not to fit.
    """
    return {name: _with_saved_rows(name, value, stored, vocab_size) for name, value in leaves.items()}


def _with_saved_rows(name: str, value: Any, stored: Stored, vocab_size: int) -> Any:
    parameter = name.removeprefix(STATE).rpartition(".")[0] if name.startswith(STATE) else name
    if not isinstance(value, DTensor) or not f".{parameter}".endswith(ROWS_OF_VOCABULARY):
        return value
    saved = stored.shape(stored.find(name) or "")
    is_padding = saved is not None and saved[1:] == value.shape[1:] and saved[0] != value.shape[0] >= vocab_size
    return with_rows(value, saved[0]) if is_padding and saved[0] >= vocab_size else value
