"""Every random generator's state as tensors and text."""

import json
import random
from typing import Any

import numpy
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker


def current_state() -> dict[str, Any]:
    """The states of this process's generators."""
    numpy_state = numpy.random.get_state(legacy=False)
    numpy_state["state"] = {**numpy_state["state"], "key": numpy_state["state"]["key"].tolist()}
    state = {
        "random_rng_state": json.dumps(random.getstate()),
        "np_rng_state": json.dumps(numpy_state),
        "torch_rng_state": torch.get_rng_state(),
        "rng_tracker_states": {name: value.clone() for name, value in get_cuda_rng_tracker().get_states().items()},
    }
    if torch.cuda.is_available():
        state["cuda_rng_state"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Sets this process's generators to a `current_state()` of the same kind of device."""
    version, numbers, gauss = json.loads(state["random_rng_state"])
    random.setstate((version, tuple(numbers), gauss))
    numpy_state = json.loads(state["np_rng_state"])
    numpy_state["state"]["key"] = numpy.array(numpy_state["state"]["key"], dtype=numpy.uint32)
    numpy.random.set_state(numpy_state)
    torch.set_rng_state(state["torch_rng_state"])
    get_cuda_rng_tracker().set_states(state["rng_tracker_states"])
    if "cuda_rng_state" in state:
        torch.cuda.set_rng_state(state["cuda_rng_state"])
