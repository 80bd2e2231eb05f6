"""Contract of megatron-core 0.16.1 with a fully sharded model, all that it reads and calls: one test per row."""

import contextlib
from collections.abc import Iterator

import pytest
import torch

from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.mcore.training import (
    Case,
    Record,
    build,
    build_optimizer,
    connect,
    schedule,
    train_sharded,
    train_whole,
)

FUSED = {"gradient_accumulation_fusion": True}


@contextlib.contextmanager
def fused_linear_layers() -> Iterator[None]:
    """megatron-core's linear layers need no kernel to write a sharded weight's gradient, but insist on one."""
    from megatron.core.tensor_parallel import layers

    before, layers._grad_accum_fusion_available = layers._grad_accum_fusion_available, True
    try:
        yield
    finally:
        layers._grad_accum_fusion_available = before


def train_with_fused_weight_gradients(case: Case) -> list[Record]:
    with fused_linear_layers():
        return train_sharded(case)


@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
def test_layers_may_write_their_weight_gradients_themselves(mcore_ranks2: RankPool, strategy: int) -> None:
    # __fsdp_param__, get_main_grad(), main_grad, grad_added_to_main_grad: tensor_parallel/layers.py
    case = Case(strategy=strategy, config=FUSED)
    (expected, *_) = mcore_ranks2.run(train_whole, Case())
    for records in mcore_ranks2.run(train_with_fused_weight_gradients, case):
        for record, wanted in zip(records, expected, strict=True):
            assert record.norm == pytest.approx(wanted.norm, rel=1e-4)
            for name, weight in record.weights.items():
                torch.testing.assert_close(weight, wanted.weights[name], rtol=1e-5, atol=1e-6)


def fused_gradients_leave_nothing_behind() -> tuple[bool, bool]:
    with fused_linear_layers():
        model = build(Case(config=FUSED))
        connect(model, build_optimizer(Case(), model))
        schedule(Case(), model, 0)
    raw = [param for group in model.param_and_grad_buffer.parameter_groups for param in group.params]
    return all(param.__fsdp_param__ for param in raw), any(hasattr(param, "main_grad") for param in raw)


def test_the_fused_gradients_memory_is_given_back(mcore_ranks2: RankPool) -> None:
    assert mcore_ranks2.run(fused_gradients_leave_nothing_behind) == [(True, False)] * 2


def refuse_fused_and_tied() -> None:
    with fused_linear_layers():
        build(Case(tied=True, config=FUSED))


def test_a_tied_weight_is_refused_with_fused_gradients(mcore_ranks2: RankPool) -> None:
    # The second writer would overwrite the first one's gradient.
    mcore_ranks2.run_expecting(NotImplementedError, "gradient_accumulation_fusion.*untie", refuse_fused_and_tied)


def write_twice() -> None:
    with fused_linear_layers():
        model = build(Case(config=FUSED))
    trained = next(group for group in model.param_and_grad_buffer.parameter_groups if group.requires_grad)
    for _ in range(2):
        trained.params[0].get_main_grad()


def test_a_second_fused_gradient_in_a_backward_is_refused(mcore_ranks2: RankPool) -> None:
    mcore_ranks2.run_expecting(RuntimeError, "second gradient in one backward.*fusion off", write_twice)


def gradients(decoupled: bool) -> dict:
    case = Case(strategy=3, ddp={"megatron_fsdp_use_decoupled_grad": decoupled})
    model = build(case)
    model.config.no_sync_func = model.no_sync
    schedule(case, model, 0)
    model.finish_grad_sync()
    name = "decoupled_grad" if decoupled else "grad"
    other = "grad" if decoupled else "decoupled_grad"
    params = list(model.parameters())
    return {
        "are_everywhere": all(
            getattr(param, name)._local_tensor.shape == param._local_tensor.shape for param in params
        ),
        "nothing_else": all(getattr(param, other, None) is None for param in params),
    }


@pytest.mark.parametrize("decoupled", [False, True])
def test_gradients_are_dtensors_on_every_rank(mcore_ranks2: RankPool, decoupled: bool) -> None:
    # param.grad._local_tensor, decoupled_grad: optimizer.py, clip_grads.py, finalize_model_grads.py
    assert mcore_ranks2.run(gradients, decoupled) == [{"are_everywhere": True, "nothing_else": True}] * 2


def what_the_optimizer_asks() -> dict:
    model = build(Case())
    schedule(Case(), model, 0)
    model.finish_grad_sync()
    model.zero_grad_buffer()
    grads = [param.grad for param in model.parameters()]
    model.start_param_sync()
    model.stop_communication()
    return {"use_megatron_fsdp": model.ddp_config.use_megatron_fsdp, "grads": set(grads)}


def test_the_models_config_and_buffers_answer_the_optimizer(mcore_ranks2: RankPool) -> None:
    # ddp_config.use_megatron_fsdp, zero_grad_buffer(), start_param_sync(): distrib_optimizer.py, optimizer/__init__.py
    assert mcore_ranks2.run(what_the_optimizer_asks) == [{"use_megatron_fsdp": True, "grads": {None}}] * 2


def weight_buffers(strategy: int) -> dict:
    model = build(Case(strategy=strategy, dtype=torch.bfloat16))
    buffer = model.param_and_grad_buffer
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().fill_(0.5)
    buffer.copy_main_weights_to_model_weights()
    model.start_param_sync(force_sync=True)
    dtypes = {group.model_weight_buffer.dtype for group in buffer.parameter_groups}
    batch = torch.zeros(1, 4, dtype=torch.long)
    with torch.no_grad():
        output = model(batch, torch.arange(4)[None], None)
    return {"dtypes": dtypes, "is_flat": bool((output == output.flatten()[0]).all())}


@pytest.mark.parametrize("strategy", [0, 3])
def test_main_weights_become_model_weights(mcore_ranks2: RankPool, strategy: int) -> None:
    # parameter_groups[*].model_weight_buffer, copy_main_weights_to_model_weights(): distrib_optimizer.py
    assert mcore_ranks2.run(weight_buffers, strategy) == [{"dtypes": {torch.bfloat16}, "is_flat": True}] * 2


def slices() -> dict[str, tuple]:
    from megatron_fsdp.mcore import unwrap_model

    model = build(Case())
    found = {}
    for name, param in unwrap_model(model).named_parameters():
        tp_mesh = param.megatron_fsdp_dist_index.get_submesh(
            [param.megatron_fsdp_dist_index.tp_dim], is_expert_parallel=False
        )
        part = param.megatron_fsdp_slice
        found[name] = (part.start, part.stop, param.to_local().numel(), param.numel(), tp_mesh.size())
    return found


def test_a_parameter_knows_its_flat_slice(mcore_ranks2: RankPool) -> None:
    # param.megatron_fsdp_slice, megatron_fsdp_dist_index: fsdp_dtensor_checkpoint.py
    first, second = mcore_ranks2.run(slices)
    for name, (start, stop, numel, full, tp_size) in first.items():
        other_start, other_stop, other_numel, *_ = second[name]
        assert (stop - start, other_stop - other_start, tp_size) == (numel, other_numel, 1)
        covered = sorted(part for part in ((start, stop), (other_start, other_stop)) if part[0] < part[1])
        assert covered[0][0] == 0 and covered[-1][1] == full and (len(covered) == 1 or covered[0][1] == covered[1][0])


def synchronization() -> dict:
    case = Case(strategy=1, microbatches=1)
    model = build(case)
    with model.no_sync():
        inside = model.is_last_microbatch
        schedule(case, model, 0)
    after = model.is_last_microbatch
    schedule(case, model, 1)
    model.start_grad_sync()
    model.finish_grad_sync(force_all_reduce=False)
    before = [param.grad.to_local().clone() for param in model.parameters()]
    model.scale_gradients(torch.tensor(0.25))
    scaled = [param.grad.to_local() for param in model.parameters()]
    model.broadcast_params()
    return {
        "inside": inside,
        "after": after,
        "is_scaled": all(torch.equal(grad * 0.25, other) for grad, other in zip(before, scaled)),
    }


def test_the_schedule_and_the_loop_find_their_calls(mcore_ranks2: RankPool) -> None:
    # no_sync, is_last_microbatch, start_grad_sync, finish_grad_sync, scale_gradients, broadcast_params: schedules
    assert mcore_ranks2.run(synchronization) == [{"inside": False, "after": True, "is_scaled": True}] * 2


def wrapped_attributes() -> dict:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.utils import get_attr_wrapped_model, get_model_config, get_model_type

    from megatron_fsdp.mcore import unwrap_model

    model = build(Case(dtype=torch.bfloat16))
    return {
        "config": get_model_config(model) is model.config,
        "type": get_model_type(model).name,
        "pre_process": get_attr_wrapped_model(model, "pre_process"),
        "unwrapped": type(unwrap_model(model)) is GPTModel and type(unwrap_model([model])[0]) is GPTModel,
        "name": next(name for name, _ in model.named_parameters()),
    }


def test_megatron_core_finds_the_model_inside(mcore_ranks2: RankPool) -> None:
    expected = {
        "config": True,
        "type": "encoder_or_decoder",
        "pre_process": True,
        "unwrapped": True,
        "name": "module.module.embedding.word_embeddings.weight",
    }
    assert mcore_ranks2.run(wrapped_attributes) == [expected] * 2
