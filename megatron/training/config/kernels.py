"""Choice of optional kernels: those that the user asked for, or, left to *auto*, those that this machine has.

megatron-core fails in the middle of a forward pass when a fused kernel is on and its package is missing. So what a
machine has is a value, `Machine`, and every choice follows from it and the configuration alone.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

from megatron.training.config.schema import RunConfig
from megatron.training.config.schema_model import ModelConfig

#: Variables that make cuBLAS, NCCL and TransformerEngine deterministic: the value to set, and all that do.
DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_ALGO": ("Ring", "Tree", "CollnetDirect", "CollnetChain", "^NVLS"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Devices, packages and environment that this process finds."""

    has_cuda: bool = False
    """A CUDA device is there."""

    has_transformer_engine: bool = False
    """TransformerEngine imports."""

    has_apex_softmax: bool = False
    """Apex's fused softmax kernels are installed."""

    has_apex_layer_norm: bool = False
    """Apex's persistent LayerNorm is installed."""

    cuda_max_connections: str | None = None
    """The environment's CUDA_DEVICE_MAX_CONNECTIONS."""

    allocator_conf: str = ""
    """The environment's PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF, its newer name."""

    determinism: Mapping[str, str] = field(default_factory=dict)
    """Those of the variables in `DETERMINISTIC` that the environment has."""

    @staticmethod
    @cache
    def probe() -> "Machine":
        """This machine. Imports torch, and TransformerEngine if there is CUDA."""
        has_cuda = importlib.import_module("torch").cuda.is_available()
        return Machine(
            has_cuda=has_cuda,
            has_transformer_engine=has_cuda and _imports("transformer_engine.pytorch"),
            has_apex_softmax=has_cuda and _is_installed("scaled_masked_softmax_cuda"),
            has_apex_layer_norm=has_cuda and _is_installed("apex") and _is_installed("fast_layer_norm"),
            cuda_max_connections=os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
            allocator_conf=f"{os.environ.get('PYTORCH_CUDA_ALLOC_CONF')},{os.environ.get('PYTORCH_ALLOC_CONF')}",
            determinism={name: os.environ[name] for name in DETERMINISTIC if name in os.environ},
        )


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _imports(module: str) -> bool:
    # An installed TransformerEngine that does not fit CUDA or torch fails with more than ImportError.
    try:
        importlib.import_module(module)
    except (ImportError, OSError, RuntimeError, AttributeError):
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The choices for one run, none of them open. Fields are named as in megatron-core's `TransformerConfig`."""

    transformer_impl: str
    bias_activation_fusion: bool
    bias_dropout_fusion: bool
    masked_softmax_fusion: bool
    apply_rope_fusion: bool
    persist_layer_norm: bool
    gradient_accumulation_fusion: bool
    cross_entropy_loss_fusion: bool
    use_cpu_initialization: bool


def transformer_impl(model: ModelConfig, machine: Machine) -> str:
    """The implementation of layers that the run uses."""
    return model.transformer_impl or ("transformer_engine" if machine.has_transformer_engine else "local")


_AUTO: Mapping[str, Callable[[ModelConfig, Machine], bool]] = {
    "bias_gelu_fusion": lambda model, machine: machine.has_cuda and model.add_bias_linear,
    # On a CPU these two work, but torch.compile wants a C++ compiler and half a minute.
    "bias_swiglu_fusion": lambda model, machine: machine.has_cuda,
    "bias_dropout_fusion": lambda model, machine: machine.has_cuda,
    "masked_softmax_fusion": lambda model, machine: machine.has_apex_softmax,
    "apply_rope_fusion": lambda model, machine: (
        machine.has_transformer_engine and model.position_embedding_type == "rope" and not model.rotary_interleaved
    ),
    "persist_layer_norm": lambda model, machine: machine.has_apex_layer_norm and model.normalization == "LayerNorm",
    "gradient_accumulation_fusion": lambda model, machine: False,
    "use_cpu_initialization": lambda model, machine: not machine.has_cuda,
}
"""The meaning of *auto*, per field."""


def choose_kernels(config: RunConfig, machine: Machine | None = None) -> Kernels:
    """Every choice that `config` leaves open, made for `machine` (default: this one)."""
    model = config.model
    machine = machine or Machine.probe()
    chosen = {
        name: auto(model, machine) if (asked := getattr(model, name)) is None else asked for name, auto in _AUTO.items()
    }
    if config.data.reset_attention_mask and model.masked_softmax_fusion is None:
        chosen["masked_softmax_fusion"] = False  # Apex's causal kernel ignores the samples' masks
    of_gelu, of_swiglu = chosen.pop("bias_gelu_fusion"), chosen.pop("bias_swiglu_fusion")
    return Kernels(
        **chosen,
        transformer_impl=transformer_impl(model, machine),
        bias_activation_fusion=of_swiglu if model.swiglu else of_gelu and not model.squared_relu,
        cross_entropy_loss_fusion=model.cross_entropy_loss_fusion,
    )
