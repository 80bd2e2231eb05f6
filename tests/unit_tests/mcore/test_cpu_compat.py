"""megatron-core runs a training step on CPU, and nothing but megatron-core notices."""

import os
import subprocess
import sys

import pytest
import torch

from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.mcore.models import gpt_config, gpt_model, initialize_groups, tokens


def install_again() -> dict:
    from megatron.core import utils
    from megatron.core.tensor_parallel import random

    from megatron_fsdp.mcore import cpu_compat

    proxy = utils.torch
    filters = len(random.logging.getLogger(random.__name__).filters)
    returned = cpu_compat.install()
    return {
        "returned": returned,
        "is_same_proxy": utils.torch is proxy,
        "is_proxy": proxy is not torch,
        "new_filters": len(random.logging.getLogger(random.__name__).filters) - filters,
    }


def test_installing_twice_changes_nothing(mcore_ranks2: RankPool) -> None:
    expected = {"returned": True, "is_same_proxy": True, "is_proxy": True, "new_filters": 0}
    assert mcore_ranks2.run(install_again) == [expected] * 2


def real_torch() -> dict:
    from megatron.core import utils

    class_is_shared = utils.torch.Tensor is torch.Tensor and utils.torch.nn is torch.nn
    try:
        torch.zeros(1, device="cuda")
        raises = False
    except (AssertionError, RuntimeError):
        raises = True
    proxied = utils.torch.zeros(2, device="cuda", pin_memory=True)
    device = utils.torch.cuda.current_device()
    return {
        "class_is_shared": class_is_shared,
        "torch_still_raises": raises,
        "proxied": proxied.device.type,
        "device": str(device),
    }


def test_only_megatron_cores_torch_is_replaced(mcore_ranks2: RankPool) -> None:
    expected = {"class_is_shared": True, "torch_still_raises": True, "proxied": "cpu", "device": "cpu"}
    assert mcore_ranks2.run(real_torch) == [expected] * 2


def streams_and_events() -> bool:
    from megatron.core import utils

    cuda = utils.torch.cuda
    stream, event = cuda.Stream(), cuda.Event(enable_timing=True)
    stream.wait_stream(cuda.current_stream())
    stream.wait_event(event.record())
    with cuda.stream(stream):
        stream.record_event().synchronize()
    cuda.synchronize()
    return stream.query() and event.query() and event.elapsed_time(event) == 0.0 and cuda.memory_allocated() == 0


def test_streams_and_events_of_a_device_without_queue(mcore_ranks2: RankPool) -> None:
    assert all(mcore_ranks2.run(streams_and_events))


def random_states_differ_and_return() -> tuple[bool, bool]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    initialize_groups()
    model_parallel_cuda_manual_seed(7)
    with get_cuda_rng_tracker().fork():
        inside = torch.rand(4)
    before = torch.get_rng_state()
    with get_cuda_rng_tracker().fork():
        again = torch.rand(4)
    return not torch.equal(inside, again), torch.equal(before, torch.get_rng_state())


def test_the_random_tracker_forks_the_cpu_generator(mcore_ranks2: RankPool) -> None:
    assert mcore_ranks2.run(random_states_differ_and_return) == [(True, True)] * 2


def train_step(overrides: dict) -> tuple[float, bool]:
    initialize_groups()
    model = gpt_model(gpt_config(**overrides))
    batch = tokens(rank=0)
    loss = model(batch, torch.arange(batch.shape[1]).expand_as(batch), None, labels=batch).mean()
    loss.backward()
    return float(loss), all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"normalization": "RMSNorm", "gated_linear_unit": True, "num_query_groups": 1},
        {"hidden_dropout": 0.1, "attention_dropout": 0.1},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        # With linear biases megatron-core recurses for ever here: the checkpointed MLP returns its bias parameter.
        {"recompute_granularity": "selective", "recompute_modules": ["mlp", "layernorm"], "add_bias_linear": False},
        {"num_moe_experts": 2, "moe_router_topk": 2, "add_bias_linear": False, "moe_token_dispatcher_type": "alltoall"},
    ],
    ids=lambda overrides: "-".join(map(str, overrides)) or "plain",
)
def test_a_gpt_trains_one_step(mcore_ranks2: RankPool, overrides: dict) -> None:
    for loss, has_all_grads in mcore_ranks2.run(train_step, overrides):
        assert 3.0 < loss < 6.0
        assert has_all_grads


def test_importing_the_module_does_not_import_megatron_core() -> None:
    code = "import sys, megatron_fsdp.mcore.cpu_compat; sys.exit('megatron.core' in sys.modules)"
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
