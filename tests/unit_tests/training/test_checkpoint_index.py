"""An index that was damaged so that it still unpickles: every reader gets a sentence, on every rank the same."""

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex

from megatron.training.checkpoint.format.metadata import read_metadata

AT = MetadataIndex("weight", torch.Size([0, 0]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A checkpoint of a tensor, a scalar, an empty tensor and a value."""
    folder = tmp_path_factory.mktemp("index")
    values = {"weight": torch.ones(4, 3), "step": torch.tensor(1.0), "empty": torch.empty(0, 2), "value": 3}
    dcp.save(values, checkpoint_id=str(folder), no_dist=True)
    return folder


def chunks(index: Metadata, *boxes: tuple[tuple, tuple]) -> None:
    index.state_dict_metadata["weight"].chunks = [
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes
    ]
    for offsets, _ in boxes:
        index.storage_data[MetadataIndex("weight", torch.Size(offsets))] = index.storage_data[AT]


DAMAGES: dict[str, Callable[[Metadata], object]] = {
    r"weight has a chunk outside of its shape": lambda index: chunks(index, ((1, 0), (4, 3))),
    r"weight has chunks that do not make up its shape \(4, 3\)": lambda index: chunks(index, ((0, 0), (3, 3))),
    r"weight has chunks that do not": lambda index: chunks(index, ((2, 0), (2, 3)), ((2, 0), (2, 3))),
    r"nothing says where weight is": lambda index: index.storage_data.pop(AT),
    r"nothing says where value is": lambda index: index.storage_data.pop(MetadataIndex("value")),
    r"no attribute 'chunks'": lambda index: vars(index.state_dict_metadata["weight"]).pop("chunks"),
    r"no attribute 'relative_path'": lambda index: vars(index.storage_data[AT]).pop("relative_path"),
    r"no attribute 'state_dict_metadata'": lambda index: vars(index).pop("state_dict_metadata"),
    r"__0_0.distcp is read before": lambda index: setattr(index.storage_data[AT], "offset", -1),
    r"weight is neither a tensor": lambda index: index.state_dict_metadata.update(weight=index.storage_data[AT]),
    r"not supported between|must be": lambda index: setattr(index.storage_data[AT], "length", "4"),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_what_no_longer_agrees_is_told(folder, tmp_path, message):
    index = read_metadata(folder)
    DAMAGES[message](index)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(ValueError, match=r"\.metadata .*" + message):
        read_metadata(tmp_path)


def test_offsets_may_be_left_out_and_values_are_no_tensors(folder, tmp_path):
    index = read_metadata(folder)
    index.storage_data[MetadataIndex("weight")] = index.storage_data.pop(AT)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index))
    assert isinstance(read_metadata(tmp_path).state_dict_metadata["value"], BytesStorageMetadata)
