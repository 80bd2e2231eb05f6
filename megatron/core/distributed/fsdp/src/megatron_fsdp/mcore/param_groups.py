"""megatron-core's parameter groups, complete without a scheduler, and the torch optimizer over them."""

from collections.abc import Sequence

import torch
from megatron.core.optimizer import _get_param_groups
from megatron.core.optimizer.optimizer_config import OptimizerConfig, ParamKey
from megatron.core.optimizer_param_scheduler import ParamGroupOverride

from megatron_fsdp.optim.optimizer import prepare_steps

ConfigOverrides = dict[ParamKey, ParamGroupOverride]

#: Options of OptimizerConfig that are refused: field -> why.
_REFUSED: dict[str, str] = {
    "use_precision_aware_optimizer": "it needs TransformerEngine's FusedAdam and decoupled gradients",
    "optimizer_cpu_offload": "optimizer state stays beside the parameter shards",
    "overlap_param_gather_with_optimizer_step": "weights are gathered one unit ahead of the forward that needs them",
    "reuse_grad_buf_for_mxfp8_param_ag": "weights are gathered into buffers of their own",
}


def check_config(config: OptimizerConfig) -> None:
    """Raises for what the optimizer would otherwise have to ignore."""
    for name, reason in _REFUSED.items():
        if getattr(config, name):
            raise NotImplementedError(
                f"OptimizerConfig.{name} is not supported with Megatron-FSDP: {reason}. Leave it off."
            )
    if config.optimizer not in ("adam", "sgd"):
        raise NotImplementedError(
            f"OptimizerConfig.optimizer is {config.optimizer!r}; Megatron-FSDP supports 'adam' and 'sgd'"
        )
    if config.lr is None:
        raise ValueError("OptimizerConfig.lr is None; set the maximum learning rate")


def build_param_groups(
    model_chunks: Sequence[torch.nn.Module], config: OptimizerConfig, config_overrides: ConfigOverrides | None
) -> list[dict]:
    """megatron-core's groups: biases and norms without decay, embedding and output with their own rate if configured.

    Each also has its own `lr` and `weight_decay`, which a scheduler later overwrites with the same meaning.
    **Collective** over all ranks.
    """
    groups = _get_param_groups(list(model_chunks), config, config_overrides)
    for group in groups:
        # OptimizerParamScheduler takes the group's value before its own, and calculates with it.
        if group["min_lr"] is None:
            group["min_lr"] = 0.0
        group["lr"] = group["max_lr"]
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
    if not any(group["params"] for group in groups):
        raise ValueError("the model has no trainable parameters; an optimizer needs at least one")
    return groups


def build_torch_optimizer(groups: list[dict], config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW, Adam or SGD as `config` says, in its fastest implementation that accepts DTensors."""
    if config.optimizer == "sgd":
        # The fused SGD has no DTensor rule (torch 2.13).
        sgd = torch.optim.SGD(
            groups, lr=config.lr, momentum=config.sgd_momentum, weight_decay=config.weight_decay, foreach=True
        )
        return prepare_steps(sgd)
    adam = torch.optim.AdamW if config.decoupled_weight_decay else torch.optim.Adam
    return prepare_steps(
        adam(
            groups,
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
    )
