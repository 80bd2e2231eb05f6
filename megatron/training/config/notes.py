"""Options that are accepted though there is nothing for them to do: each with one line in the log that says so."""

from collections.abc import Callable

from megatron.training.config.kernels import Kernels
from megatron.training.config.rule_book import is_given, spelled
from megatron.training.config.schema import RunConfig

Predicate = Callable[[RunConfig, Kernels], object]

NOTHING_TO_DO: tuple[tuple[str, Predicate, str], ...] = (
    (
        "checkpoint.auto_detect_ckpt_format",
        lambda config, kernels: True,
        "formats are always recognized",
    ),
    (
        "ddp.use_distributed_optimizer",
        lambda config, kernels: True,
        "--use-megatron-fsdp implies it",
    ),
    (
        "ddp.overlap_grad_reduce",
        lambda config, kernels: config.ddp.shards_grads,
        "sharded gradients are always reduced during backward",
    ),
    (
        "ddp.overlap_param_gather",
        lambda config, kernels: config.ddp.shards_weights,
        "sharded weights are always gathered ahead",
    ),
    (
        "ddp.fsdp_manual_registration",
        lambda config, kernels: config.ddp.nccl_ub,
        "--use-nccl-ub implies it",
    ),
    (
        "model.attention_softmax_in_fp32",
        lambda config, kernels: (
            kernels.transformer_impl != "local" or not (config.precision.bf16 or config.precision.fp16)
        ),
        "the attention's softmax is in fp32 anyway",
    ),
    (
        "model.max_position_embeddings",
        lambda config, kernels: config.model.position_embedding_type != "learned_absolute",
        "positions have no weights; it only bounds --seq-length",
    ),
    (
        "model.ffn_hidden_size",
        lambda config, kernels: config.model.num_experts is not None and config.model.moe_ffn_hidden_size is not None,
        "every layer has experts, of --moe-ffn-hidden-size",
    ),
    (
        "validation.eval_interval",
        lambda config, kernels: config.validation.eval_iters == 0,
        "--eval-iters 0 evaluates never",
    ),
    (
        "train.check_for_nan_in_loss_and_grad",
        lambda config, kernels: config.precision.fp16 and config.precision.loss_scale is None,
        "a dynamic loss scale never checks, since it skips overflowing steps",
    ),
    (
        "checkpoint.load_optim",
        lambda config, kernels: config.checkpoint.finetune,
        "--finetune reads the weights only",
    ),
    (
        "checkpoint.load_rng",
        lambda config, kernels: config.checkpoint.finetune,
        "--finetune reads the weights only",
    ),
    (
        "data.mid_level_dataset_surplus",
        lambda config, kernels: config.data.mock_data,
        "made-up samples never run out",
    ),
)
"""A field, the configurations in which another value than its default changes nothing, and the reason."""


def notes(config: RunConfig, kernels: Kernels) -> list[str]:
    """Lines for the log, one for each option of a checked `config` that has nothing to do."""
    return [
        f"{spelled(path, config)}: nothing to do, {reason}"
        for path, is_idle, reason in NOTHING_TO_DO
        if is_given(config, path) and is_idle(config, kernels)
    ]
