"""The task of `pretrain_gpt.py`: megatron-core's GPT on next-token prediction."""

from collections.abc import Iterator
from dataclasses import fields
from functools import partial

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig

from megatron.training.config.plan import max_positions
from megatron.training.config.schema_model import ModelConfig
from megatron.training.data import (
    DatasetRequest,
    Datasets,
    SampleCounts,
    build_train_valid_test_datasets,
    get_batch,
)
from megatron.training.job import Job
from megatron.training.state import LossFunction, Task
from megatron.training.step import LOSS


def model_provider(job: Job, core_config: TransformerConfig) -> GPTModel:
    """The GPT of `job`, on the device where megatron-core makes its weights."""
    model = job.config.model
    return GPTModel(
        core_config,
        layer_spec(model, job.plan.kernels.transformer_impl),
        vocab_size=job.plan.padded_vocab_size,
        max_sequence_length=max_positions(job.config),
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,
        rope_scaling=model.use_rope_scaling,
        rope_scaling_factor=model.rope_scaling_factor,
        seq_len_interpolation_factor=model.rotary_seq_len_interpolation_factor,
    )


def layer_spec(model: ModelConfig, transformer_impl: str) -> ModuleSpec:
    """The modules that a transformer layer consists of."""
    if transformer_impl == "transformer_engine":
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=model.num_experts, moe_grouped_gemm=False, qk_layernorm=model.qk_layernorm
        )
    return get_gpt_layer_local_spec(
        num_experts=model.num_experts,
        moe_grouped_gemm=False,
        qk_layernorm=model.qk_layernorm,
        normalization=model.normalization,
    )


def forward_step(stream: Iterator, model: torch.nn.Module) -> tuple[torch.Tensor, LossFunction]:
    """Losses of the next micro-batch, (samples, length), and what makes one number of them."""
    batch = get_batch(stream, model.device)
    output = model(batch.tokens, batch.position_ids, batch.attention_mask, labels=batch.labels)
    return output, partial(masked_sum, batch.loss_mask)


def masked_sum(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """(sum of the losses that count, how many count, report); megatron-core divides the one by the other."""
    mask = loss_mask.reshape(-1).float()
    total = torch.sum(losses.reshape(-1).float() * mask)
    count = mask.sum()
    return total, count.to(torch.int), {LOSS: torch.stack([total.detach(), count])}


def datasets_provider(job: Job) -> Datasets:
    """The sets of `job`, none where nothing is drawn. **Collective.**"""
    names = {field.name for field in fields(DatasetRequest)} - {"seed"}
    data = {name: getattr(job.config.data, name) for name in names}
    request = DatasetRequest(seed=job.config.rng.seed, **data)
    trained = 0 if job.config.validation.skip_train else job.plan.train_samples
    counts = SampleCounts(train=trained, valid=job.plan.valid_samples, test=job.plan.test_samples)
    return build_train_valid_test_datasets(request, counts, job.tokenizer)


TASK = Task(model_provider=model_provider, forward_step=forward_step, datasets_provider=datasets_provider)
