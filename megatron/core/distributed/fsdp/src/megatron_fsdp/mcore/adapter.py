"""`FullyShardedDataParallel`: the engine under megatron-core's names and arguments; it holds no tensor of its own."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, overload

import torch
from megatron.core.distributed import DistributedDataParallel, TorchFullyShardedDataParallel
from megatron.core.distributed import DistributedDataParallelConfig as McoreDistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import nn

from megatron_fsdp.build.find_units import resolve_unit_classes
from megatron_fsdp.config import shards_anything
from megatron_fsdp.mcore import fused_grads
from megatron_fsdp.mcore.ddp_config import resolve_ddp_config
from megatron_fsdp.mcore.parallel_layout import tag_modes
from megatron_fsdp.mcore.process_groups import build_dist_index
from megatron_fsdp.megatron_fsdp import MegatronFSDP

#: Prefix of the user's model in state dicts and checkpoints, whatever wrappers are around it.
MODEL_PREFIX = "module."

#: Classes whose instances are units, by import path.
_UNIT_CLASSES = (
    "megatron.core.transformer.transformer_layer.TransformerLayer",
    "megatron.core.transformer.transformer_layer.MoETransformerLayer",
    "megatron.core.ssm.mamba_layer.MambaLayer",
)
#: TransformerConfig options that the engine is not combined with: field -> (the value that means off, why).
_REFUSED: dict[str, tuple[object, str]] = {
    "overlap_moe_expert_parallel_comm": (False, "it calls layers in parts, whose weights are gathered as one"),
    "delay_wgrad_compute": (
        False,
        "gradients are reduced when their unit's backward ends, before a delayed one exists",
    ),
    "cuda_graph_impl": ("none", "graphs capture the addresses of weights that are gathered anew in each forward"),
}

WRAPPERS = (MegatronFSDP, DistributedDataParallel, TorchFullyShardedDataParallel, Float16Module)


class LoadResult(NamedTuple):
    """Keys that a load left out, as `torch.nn.Module.load_state_dict` reports them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class FullyShardedDataParallel(MegatronFSDP):
    """A megatron-core model whose parameters, gradients and optimizer state are sharded over the data-parallel ranks.

    `.module` is what was passed in, so that parameters have the names that megatron-core's DistributedDataParallel
    gives them. **Collective**: all data-parallel ranks construct it alike.

    Args:
        config: of the model.
        ddp_config: megatron-core's class or this package's; stays as it is. `.ddp_config` shows what was made of it.
        module: on any device, in a Float16Module for bf16 and fp16.
        fsdp_unit_modules: classes or import paths of what is gathered and released as one; None: transformer and
            Mamba layers if anything is sharded at all.
        disable_bucketing: never cut the parameters outside all units.
        device: where to compute; None: the current CUDA device, or the CPU where there is none.
        pg_collection: process groups; None: megatron-core's global ones.

    Raises:
        ValueError, TypeError, ImportError: a mistake in the arguments.
        NotImplementedError: a combination that is refused.
    """

    def __init__(
        self,
        config: TransformerConfig,
        ddp_config: McoreDistributedDataParallelConfig,
        module: nn.Module,
        fsdp_unit_modules: Sequence[type | str] | None = None,
        disable_bucketing: bool = False,
        device: torch.device | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        _check(config, module)
        if fsdp_unit_modules is None:
            is_sharded = shards_anything(ddp_config.data_parallel_sharding_strategy, "data_parallel_sharding_strategy")
            fsdp_unit_modules = default_unit_modules(module) if is_sharded else []
        ddp_config = resolve_ddp_config(ddp_config, unbucketed_numel=numel_outside(module, fsdp_unit_modules))
        root_params = weights_read_elsewhere(module)
        tag_modes(module)
        if config.gradient_accumulation_fusion:
            fused_grads.check(root_params)
        super().__init__(
            module,
            build_dist_index(
                pg_collection,
                device_type=torch.device(device).type if device is not None else None,
                num_distributed_optimizer_instances=ddp_config.num_distributed_optimizer_instances,
                outer_dp_sharding_strategy=ddp_config.outer_dp_sharding_strategy,
            ),
            ddp_config,
            fsdp_unit_modules=fsdp_unit_modules,
            disable_bucketing=disable_bucketing,
            device=device,
            calculate_per_token_loss=config.calculate_per_token_loss,
            init_model_with_meta_device=getattr(config, "init_model_with_meta_device", False),
            root_params=root_params,
        )
        self.config = config
        # megatron-core reads fields of this attribute that the engine does not have, `use_megatron_fsdp` among them.
        self.ddp_config = ddp_config
        self.megatron_fsdp_dist_index = self.dist_index
        self.tp_group = self.dist_index.get_submesh((self.dist_index.tp_dim,)).get_group()
        if config.gradient_accumulation_fusion:
            fused_grads.install(self.param_and_grad_buffer)

    def stop_communication(self) -> None:
        """Ends every reduction and gather on its way; modules show sharded parameters. **Collective.**"""
        self.synchronize_gradient_reduce()
        self.synchronize_param_gather()

    # -- state dicts ----------------------------------------------------------------------------------------------
    #
    # Float16Module hides its own name from state dicts by passing the calls on to the model, past the hooks
    # that the engine has on it. So the standard calls are made here, on it, and its name is taken out of the keys.

    def state_dict(  # type: ignore[override]  # torch's positional arguments are deprecated
        self, *, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Main weights as DTensors and buffers, named `module.` and the user's name, with or without Float16Module."""
        wrapped = nn.Module.state_dict(self.module, keep_vars=keep_vars)
        inner = self._wrapper_prefix()
        state_dict = {} if destination is None else destination
        state_dict.update({prefix + MODEL_PREFIX + key.removeprefix(inner): value for key, value in wrapped.items()})
        return state_dict

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """`state_dict()` under the name that megatron-core calls."""
        return self.state_dict(prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> LoadResult:
        """Loads a `state_dict()`, or the bare model's, sharded or full; compute weights are then current.

        **Collective.** Modules' `_extra_state`, which `state_dict()` leaves out, may be absent.

        Raises:
            RuntimeError: shapes differ, or with `strict` a key is missing or unexpected.
        """
        inner = self._wrapper_prefix()
        wrapped = {inner + key.removeprefix(MODEL_PREFIX): value for key, value in state_dict.items()}
        missing, unexpected = nn.Module.load_state_dict(self.module, wrapped, strict=False, assign=assign)
        result = LoadResult(
            [key.removeprefix(inner) for key in missing if not key.endswith("_extra_state")],
            [key.removeprefix(inner) for key in unexpected if not key.endswith("_extra_state")],
        )
        if strict and any(result):
            raise RuntimeError(
                f"the state dict does not fit the model: missing {result.missing_keys}, "
                f"unexpected {result.unexpected_keys}; pass strict=False to load what does"
            )
        return result

    def _wrapper_prefix(self) -> str:
        """The prefix that wrappers between `.module` and the user's model add to names."""
        prefix, module = "", self.module
        while isinstance(module, WRAPPERS):
            prefix, module = prefix + "module.", module.module
        return prefix


def _check(config: TransformerConfig, model: nn.Module) -> None:
    for name, (off, reason) in _REFUSED.items():
        value = getattr(config, name, off)
        if value != off:
            raise NotImplementedError(
                f"TransformerConfig.{name}={value!r} is not supported with Megatron-FSDP: {reason}. Use {off!r}."
            )
    classes = {cls.__module__.split(".")[0] for module in model.modules() for cls in type(module).__mro__}
    for name in ("fp8", "fp4"):
        value = getattr(config, name, None)
        if value and "transformer_engine" not in classes:
            raise NotImplementedError(
                f"TransformerConfig.{name}={value!r} means nothing to local layers, which would compute in "
                f"{config.params_dtype}; use TransformerEngine's, or leave {name} out."
            )


def default_unit_modules(model: nn.Module) -> list[type]:
    """Layer classes of megatron-core that occur in `model`; an empty list makes the whole model one unit."""
    classes = dict.fromkeys(cls for module in model.modules() for cls in type(module).__mro__)
    return [cls for cls in classes if f"{cls.__module__}.{cls.__qualname__}" in _UNIT_CLASSES]


def weights_read_elsewhere(model: nn.Module) -> list[nn.Parameter]:
    """Weights that another module than their owner computes with; no hook on the owner would see that.

    megatron-core's output layer has no weight of its own when it is tied: the model hands it the embedding's. So does
    multi-token prediction.
    """
    found = []
    for module in model.modules():
        is_tied = getattr(module, "share_embeddings_and_output_weights", False) or getattr(module, "mtp_process", False)
        weight_of = getattr(module, "shared_embedding_or_output_weight", None)
        if is_tied and weight_of is not None:
            weight = weight_of()
            if weight is not None:
                found.append(weight)
    return found


def numel_outside(model: nn.Module, unit_modules: Sequence[type | str]) -> int:
    """Elements of parameters that no unit holds."""
    classes = resolve_unit_classes(unit_modules)
    inside = {id(param) for module in model.modules() if isinstance(module, classes) for param in module.parameters()}
    return sum(param.numel() for param in model.parameters() if id(param) not in inside)


@overload
def unwrap_model(model: nn.Module, wrappers: tuple[type, ...] = ...) -> nn.Module: ...
@overload
def unwrap_model(model: list[nn.Module], wrappers: tuple[type, ...] = ...) -> list[nn.Module]: ...
def unwrap_model(
    model: nn.Module | list[nn.Module], wrappers: tuple[type, ...] = WRAPPERS
) -> nn.Module | list[nn.Module]:
    """The innermost module of `model`, or of each model in a list.

    megatron-core's function of this name knows only its own wrapper classes.
    """
    if isinstance(model, list):
        return [unwrap_model(chunk, wrappers) for chunk in model]
    while isinstance(model, wrappers):
        model = model.get_submodule("module")
    return model
