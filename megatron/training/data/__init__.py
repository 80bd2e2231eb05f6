"""Token samples for pre-training: which sets, in which order, and as which tensors."""

from megatron.training.data.gpt import (
    DatasetRequest,
    Datasets,
    SampleCounts,
    build_train_valid_test_datasets,
    sample_counts,
)
from megatron.training.data.loader import (
    Batch,
    DataExhaustedError,
    DataStream,
    LoaderOptions,
    build_data_loader,
    build_data_stream,
    get_batch,
)
from megatron.training.data.samplers import MegatronPretrainingRandomSampler, MegatronPretrainingSampler

__all__ = [
    "Batch",
    "DataExhaustedError",
    "DataStream",
    "DatasetRequest",
    "Datasets",
    "LoaderOptions",
    "MegatronPretrainingRandomSampler",
    "MegatronPretrainingSampler",
    "SampleCounts",
    "build_data_loader",
    "build_data_stream",
    "build_train_valid_test_datasets",
    "get_batch",
    "sample_counts",
]
