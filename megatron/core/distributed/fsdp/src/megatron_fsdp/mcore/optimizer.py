"""megatron-core's optimizer interface over torch optimizers that step on sharded parameters."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler, MegatronGradScaler
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.transformer.module import param_is_not_shared

from megatron_fsdp.mcore import fqn_state, param_groups
from megatron_fsdp.mcore.adapter import unwrap_model
from megatron_fsdp.mcore.process_groups import grad_stats_group
from megatron_fsdp.megatron_fsdp import MegatronFSDP
from megatron_fsdp.optim import grad_norm
from megatron_fsdp.optim.local_step import create_state


class FullyShardedOptimizer(MixedPrecisionOptimizer):
    """Steps on the main weights' shards of `FullyShardedDataParallel` models.

    Main weights and gradients are the DTensors that the model shows as `parameters()` and their `.grad`, so nothing is
    copied between model and main tensors: `finish_grad_sync` has attached the gradients before a step, and
    `install_optimized_model_weights` makes the compute weights current after it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: OptimizerConfig,
        grad_scaler: MegatronGradScaler | None,
        model_chunks: Sequence[MegatronFSDP],
        grad_stats_group: dist.ProcessGroup,
    ):
        """
        Args:
            optimizer: over the chunks' parameters.
            config: megatron-core's.
            grad_scaler: None for bf16 and fp32 without a loss scale.
            model_chunks: `FullyShardedDataParallel` models.
            grad_stats_group: all ranks that hold distinct gradient shards; they agree on norm, zeros and overflow.
        """
        super().__init__(optimizer, config, grad_scaler, init_state_fn=lambda optimizer, _: create_state(optimizer))
        self.model_chunks = list(model_chunks)
        self.is_stub_optimizer = False
        self.grad_stats_parallel_group = grad_stats_group
        self.on_grad_norm: Callable[[torch.Tensor], None] | None = None
        """Given the norm, a scalar tensor, before it clips and before anything is updated; may raise, on every rank.

        If there is one, the norm is taken also where nothing is clipped by it.
        """

    def _grads(self) -> list[torch.Tensor]:
        """Gradients of distinct parameters, as DTensors; a tied parameter counts once."""
        unique = {id(param): param for param in self.get_parameters() if param_is_not_shared(param)}
        return [param.grad for param in unique.values() if param.grad is not None]

    def _device(self) -> torch.device:
        return self.get_parameters()[0].device

    def get_grad_stats_parallel_group(self) -> dist.ProcessGroup:
        """All ranks that hold distinct gradient shards."""
        return self.grad_stats_parallel_group

    def get_main_grads_for_grad_norm(self) -> list[torch.Tensor]:
        """This rank's gradient rows that count here towards the norm."""
        return grad_norm.counted_here(self._grads())

    @torch.no_grad()
    def get_grad_norm(self) -> torch.Tensor:
        """The 2-norm of all gradients, a scalar tensor on the device. **Collective.**"""
        counted = self.get_main_grads_for_grad_norm()
        return grad_norm.total_norm(counted, [self.grad_stats_parallel_group], self._device())

    @torch.no_grad()
    def clip_grad_norm(self, clip_grad: float) -> torch.Tensor:
        """Clips the gradients to norm `clip_grad` (see `clip_by_norm`); gives back the norm before. **Collective.**"""
        norm = self.get_grad_norm()
        if self.on_grad_norm is not None:
            self.on_grad_norm(norm)
        grad_norm.clip_by_norm(self._grads(), clip_grad, norm)
        return norm

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Updates the weights; True. **Collective** if the norm is yet to be taken."""
        if self.on_grad_norm is not None and not self.config.clip_grad > 0:
            self.on_grad_norm(self.get_grad_norm())
        return super().step_with_ready_grads()

    @torch.no_grad()
    def count_zeros(self) -> torch.Tensor:
        """The number of gradient elements that are zero, a scalar tensor on the device. **Collective.**"""
        return grad_norm.count_zeros(self._grads(), self.grad_stats_parallel_group, self._device())

    def _collect_main_grad_data_for_unscaling(self) -> list[torch.Tensor]:
        # Every parameter, shared ones too: this list is scaled in place.
        return grad_norm.local_grads([param.grad for param in self.get_parameters() if param.grad is not None])

    def _copy_model_grads_to_main_grads(self) -> None:
        """Nothing to copy: the model's gradients are the main gradients."""

    def _copy_main_params_to_model_params(self) -> None:
        for chunk in self.model_chunks:
            chunk.install_optimized_model_weights()

    def _copy_model_params_to_main_params(self, state_dict: dict | None = None) -> None:
        """A model loads its weights into the main weights, so only the compute weights may be stale."""
        if state_dict is not None:
            raise NotImplementedError("main weights cannot be set from a state dict here; load it into the model")
        self._copy_main_params_to_model_params()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zeroes the model's gradient buffers and drops `.grad`."""
        if not set_to_none:
            raise NotImplementedError(
                "gradients are views of the model's buffers, attached anew each step; use set_to_none=True"
            )
        for chunk in self.model_chunks:
            chunk.zero_grad_buffer()

    def offload_to_cpu(self) -> None:
        """Refused: parameters are views of the engine's buffers and must stay where these are."""
        raise NotImplementedError("Megatron-FSDP does not offload optimizer state to the CPU")

    restore_from_cpu = offload_to_cpu

    def state_dict(self) -> dict:
        """State by parameter index, as torch optimizers write it; tensors are this rank's DTensors."""
        state_dict = {"optimizer": self.optimizer.state_dict()}
        if self.grad_scaler:
            state_dict["grad_scaler"] = self.grad_scaler.state_dict()
        return state_dict

    def load_state_dict(self, state_dict: dict) -> None:
        """Takes over a `state_dict()` of the same model on the same ranks."""
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self._load_grad_scaler(state_dict)

    def sharded_state_dict(
        self, model_sharded_state_dict: dict, is_loading: bool = False, metadata: dict | None = None
    ) -> dict:
        """Refused: this is megatron-core's own checkpoint format."""
        raise NotImplementedError(
            "Megatron-FSDP writes optimizer state through fqn_state_dict() and torch's distributed checkpoint"
        )

    def fqn_state_dict(self) -> dict:
        """State keyed by parameter name, for torch's distributed checkpoint: to save, or to load into in place.

        `{"state": {fqn: {name: tensor}}, "param_to_group_meta": {fqn: {option: value}}}`, and `"grad_scaler"` if there
        is one. State that does not exist yet is created, without a step. Names are the user's, without any wrapper's.
        """
        create_state(self.optimizer)
        state_dict = fqn_state.export(self.optimizer, self._fqns())
        if self.grad_scaler:
            state_dict["grad_scaler"] = self.grad_scaler.state_dict()
        return state_dict

    def load_fqn_state_dict(self, state_dict: dict) -> None:
        """Takes over a `fqn_state_dict()`, saved on any number of ranks and read back for these.

        Raises:
            ValueError: a parameter or one of its tensors is missing, or parameters of one group have different options.
        """
        create_state(self.optimizer)
        fqn_state.load(self.optimizer, self._fqns(), state_dict)
        self._load_grad_scaler(state_dict)

    def _fqns(self) -> dict[torch.nn.Parameter, str]:
        return {param: name for chunk in self.model_chunks for name, param in unwrap_model(chunk).named_parameters()}

    def _load_grad_scaler(self, state_dict: dict) -> None:
        if not self.grad_scaler:
            return
        if "grad_scaler" not in state_dict:
            raise ValueError("the optimizer scales the loss but the loaded state has no 'grad_scaler'")
        self.grad_scaler.load_state_dict(state_dict["grad_scaler"])


def get_megatron_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[MegatronFSDP],
    config_overrides: param_groups.ConfigOverrides | None = None,
) -> FullyShardedOptimizer:
    """The optimizer of one `FullyShardedDataParallel` model. **Collective** over all ranks.

    Args:
        config: megatron-core's; `optimizer` is "adam" (AdamW, or Adam with `decoupled_weight_decay=False`) or "sgd".
        model_chunks: a list of one model.
        config_overrides: as megatron-core's function takes them; None gives its standard rules.

    Raises:
        NotImplementedError: several chunks, or an option of `config` that would have to be ignored.
        ValueError: no learning rate, or nothing to train.
    """
    param_groups.check_config(config)
    if len(model_chunks) != 1:
        raise NotImplementedError(
            f"got {len(model_chunks)} model chunks; without pipeline parallelism there is exactly one"
        )
    model = model_chunks[0]
    if model.ddp_config.megatron_fsdp_use_decoupled_grad:
        raise NotImplementedError(
            "megatron_fsdp_use_decoupled_grad attaches gradients as decoupled_grad, which torch optimizers do not "
            "read; turn it off"
        )
    groups = param_groups.build_param_groups(model_chunks, config, config_overrides)
    return FullyShardedOptimizer(
        param_groups.build_torch_optimizer(groups, config),
        config,
        build_grad_scaler(config),
        model_chunks,
        grad_stats_group(model.dist_index),
    )


def build_grad_scaler(config: OptimizerConfig) -> MegatronGradScaler | None:
    """A constant scale if one is given, a dynamic one for fp16, else None."""
    if config.loss_scale:
        return ConstantGradScaler(config.loss_scale)
    if not config.fp16:
        return None
    return DynamicGradScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )
