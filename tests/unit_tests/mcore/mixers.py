"""megatron-core's gated delta-net and Mamba layers on the CPU, without the kernels that they are made for."""

import sys
from unittest import mock

import torch
from torch import nn

from tests.unit_tests.mcore.models import HIDDEN, gpt_config

_MISSING = (
    "triton",
    "triton.language",
    "einops",
    "mamba_ssm",
    "mamba_ssm.ops",
    "mamba_ssm.ops.triton",
    "mamba_ssm.ops.triton.layernorm_gated",
    "mamba_ssm.ops.triton.selective_state_update",
    "mamba_ssm.ops.triton.ssd_combined",
)
"""Package that megatron-core's Mamba layer imports; building one needs of it a norm with a weight."""


class RMSNormGated(nn.Module):
    """The weight of the norm of that name."""

    def __init__(self, size: int, **_: object):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class Mixers(nn.Module):
    """One layer of each kind, under the names that they have in models of megatron-core; Mamba's cannot compute."""

    def __init__(self, tp: int):
        super().__init__()
        delta_net, mamba = _modules()
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.tensor_parallel import (
            ColumnParallelLinear,
            RowParallelLinear,
            model_parallel_cuda_manual_seed,
        )
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        torch.manual_seed(1)
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        self.config = gpt_config(
            tensor_model_parallel_size=tp,
            linear_key_head_dim=4,
            linear_value_head_dim=6,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            mamba_state_dim=3,
            mamba_head_dim=8,
            mamba_num_groups=2,
            deterministic_mode=True,
            activation_func=nn.functional.silu,
            normalization="RMSNorm",
            add_bias_linear=False,
        )
        groups = ProcessGroupCollection.use_mpu_process_groups()
        parts = delta_net.GatedDeltaNetSubmodules(ColumnParallelLinear, WrappedTorchNorm, RowParallelLinear)
        with mock.patch.object(delta_net, "HAVE_FLA", True):
            attention = delta_net.GatedDeltaNet(
                self.config, parts, 1, conv_bias=True, use_qk_l2norm=False, pg_collection=groups
            )
        mixer = mamba.MambaMixer(
            self.config,
            mamba.MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear),
            HIDDEN,
            pg_collection=groups,
        )
        layers = [nn.ModuleDict({"self_attention": attention}), nn.ModuleDict({"mixer": mixer})]
        self.decoder = nn.ModuleDict({"layers": nn.ModuleList(layers)})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.compiler.set_stance("force_eager"):  # megatron-core compiles a norm, which takes long
            return self.decoder["layers"][0]["self_attention"](hidden, None)[0]


def _modules() -> tuple:
    from megatron.core.ssm import gated_delta_net

    from megatron_fsdp.mcore import cpu_compat

    missing = {name: mock.MagicMock() for name in _MISSING}
    missing["mamba_ssm.ops.triton.layernorm_gated"].RMSNorm = RMSNormGated
    with mock.patch.dict(sys.modules, missing):
        from megatron.core.ssm import mamba_mixer

        cpu_compat.install()
    return gated_delta_net, mamba_mixer
