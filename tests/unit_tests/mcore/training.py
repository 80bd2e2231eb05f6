"""The same few training steps twice: sharded through megatron-core's schedule, and whole in plain torch.

Call inside a rank with megatron-core. Both give `Record`s to compare.
"""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from tests.unit_tests.mcore.models import gpt_config, gpt_model, initialize_groups, tokens

STEPS, LR, WEIGHT_DECAY, CLIP = 2, 0.01, 0.1, 0.5
#: Of the gradients' magnitude. With torch's default, Adam turns the rounding of a tiny gradient into a full step.
ADAM_EPS = 1e-2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Model and options of training."""

    strategy: str | int = 3
    tied: bool = False
    dtype: torch.dtype = torch.float32
    microbatches: int = 2
    per_token: bool = False
    seed: int = 11
    optimizer: str = "adam"
    loss_scale: float | None = None
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Options of the model's configuration."""
    recompute: dict[str, Any] = dataclasses.field(default_factory=dict)
    """More of them, which change no number."""
    ddp: dict[str, Any] = dataclasses.field(default_factory=dict)
    groups: dict[str, int] = dataclasses.field(default_factory=dict)
    """Sizes of megatron-core's parallel groups."""
    units: tuple[str, ...] | None = None
    """Import paths of unit classes."""
    frozen: str = ""
    """Parameters whose name contains this are not trained."""

    def reference(self) -> "Case":
        """The case that plain torch knows: nothing in it speaks of sharding."""
        return dataclasses.replace(self, strategy=0, recompute={}, ddp={}, groups={}, units=None, loss_scale=None)

    def model(self) -> torch.nn.Module:
        """The user's model, the same on every rank but for its share of the experts. **Collective.**"""
        initialize_groups()
        model = gpt_model(self.transformer_config(), tied=self.tied, seed=self.seed)
        if self.groups:
            whole = dict(model.named_parameters())
            initialize_groups(**self.groups)
            ep = self.groups.get("expert_model_parallel_size", 1)
            model = gpt_model(self.transformer_config(expert_model_parallel_size=ep), tied=self.tied, seed=self.seed)
            with torch.no_grad():
                for name, param in model.named_parameters():
                    param.copy_(whole[global_name(name, model.config)])
        for name, param in model.named_parameters():
            param.requires_grad_(not (self.frozen and self.frozen in name))
        return model

    def transformer_config(self, **overrides: Any):
        return gpt_config(
            bf16=self.dtype is torch.bfloat16,
            fp16=self.dtype is torch.float16,
            params_dtype=self.dtype,
            calculate_per_token_loss=self.per_token,
            **{**self.config, **self.recompute, **overrides},
        )


def global_name(name: str, config) -> str:
    """The parameter's name in a model that has the experts of all expert-parallel ranks."""
    from megatron.core import parallel_state

    head, found, tail = name.partition(".local_experts.")
    if not found:
        return name
    number, _, rest = tail.partition(".")
    share = config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
    return f"{head}{found}{int(number) + share * parallel_state.get_expert_model_parallel_rank()}.{rest}"


@dataclasses.dataclass(frozen=True)
class Record:
    """One step: the loss over all ranks before it, the gradients' norm and zeros, and the whole weights after it."""

    loss: float
    norm: float
    zeros: int
    weights: dict[str, torch.Tensor]


def build(case: Case) -> torch.nn.Module:
    """A sharded model. **Collective.**"""
    from megatron.core.transformer.module import Float16Module

    from megatron_fsdp.mcore import DistributedDataParallelConfig, FullyShardedDataParallel

    model = case.model()
    config = model.config
    if case.dtype is not torch.float32:
        model = Float16Module(config, model)
    ddp_config = DistributedDataParallelConfig(data_parallel_sharding_strategy=case.strategy, **case.ddp)
    return FullyShardedDataParallel(config, ddp_config, model, case.units)


def build_optimizer(case: Case, model: torch.nn.Module):
    from megatron.core.optimizer import OptimizerConfig

    from megatron_fsdp.mcore import get_megatron_optimizer

    config = OptimizerConfig(
        optimizer=case.optimizer,
        lr=LR,
        min_lr=0.0,
        weight_decay=WEIGHT_DECAY,
        adam_eps=ADAM_EPS,
        clip_grad=CLIP,
        bf16=case.dtype is torch.bfloat16,
        fp16=case.dtype is torch.float16,
        params_dtype=case.dtype,
        loss_scale=case.loss_scale,
        initial_loss_scale=256.0,
        log_num_zeros_in_grad=True,
    )
    return get_megatron_optimizer(config, [model])


def loss_mask(batch: torch.Tensor) -> torch.Tensor:
    """Leaves out a number of tokens that differs between batches."""
    return (batch % 3 != 0).float()


def forward_step(iterator, model):
    """megatron-core's forward step function; the loss comes as (sum, tokens, report)."""
    batch = next(iterator)
    output = model(batch, torch.arange(batch.shape[1]).expand_as(batch), None, labels=batch)

    def loss_func(losses: torch.Tensor):
        mask = loss_mask(batch)
        total, count = (losses * mask).sum(), mask.sum().to(torch.int)
        return total, count, {"sum": float(total), "count": int(count)}

    return output, loss_func


def schedule(case: Case, model: torch.nn.Module, step: int, *, forward_only: bool = False) -> list[dict]:
    """Forward and backward of one step through megatron-core. **Collective.**"""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    batches = iter([tokens(dist.get_rank(), step, micro) for micro in range(case.microbatches)])
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batches,
        model=[model],
        num_microbatches=case.microbatches,
        seq_length=None,
        micro_batch_size=None,
        forward_only=forward_only,
    )


def connect(model: torch.nn.Module, optimizer) -> None:
    """Hands megatron-core's schedule what it calls back."""
    from megatron.core.distributed import finalize_model_grads

    model.config.finalize_model_grads_func = finalize_model_grads
    model.config.grad_scale_func = optimizer.scale_loss
    model.config.no_sync_func = model.no_sync


def mean_loss(reports: list[dict], case: Case) -> float:
    """The loss over all ranks and micro-batches, as it is differentiated. **Collective.**"""
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, reports)
    flat = [report for reports in everyone for report in reports]
    if case.per_token:
        return sum(report["sum"] for report in flat) / sum(report["count"] for report in flat)
    return sum(report["sum"] / report["count"] for report in flat) / len(flat)


def whole_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Main weights by the user's names, experts by their global numbers. **Collective.**"""
    from megatron_fsdp.mcore import unwrap_model

    named = unwrap_model(model).named_parameters()
    return {global_name(name, model.config): param.full_tensor() for name, param in named}


def train_step(case: Case, model: torch.nn.Module, optimizer, step: int) -> Record:
    """**Collective.**"""
    optimizer.zero_grad()
    loss = mean_loss(schedule(case, model, step), case)
    success, norm, zeros = optimizer.step()
    assert success
    return Record(loss, float(norm), int(zeros), whole_weights(model))


def train_sharded(case: Case) -> list[Record]:
    """A pool job."""
    model = build(case)
    optimizer = build_optimizer(case, model)
    connect(model, optimizer)
    return [train_step(case, model, optimizer, step) for step in range(STEPS)]


def train_whole(case: Case) -> list[Record]:
    """A pool job: every rank computes all ranks' batches itself, in `case.dtype`; everything else is in fp32."""
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    world_size = dist.get_world_size()
    model = case.model().to(case.dtype)
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    main = {name: param.detach().float().requires_grad_() for name, param in trained.items()}
    optimizer = _whole_optimizer(case, main)
    # The schedule's part in multi-token prediction, whose loss enters backward by itself.
    MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0 / (world_size * case.microbatches)))
    records = []
    for step in range(STEPS):
        model.zero_grad()
        parts = [
            _whole_loss(model, tokens(rank, step, micro))
            for rank in range(world_size)
            for micro in range(case.microbatches)
        ]
        if case.per_token:
            loss = sum(total for total, _ in parts) / sum(count for _, count in parts)
        else:
            loss = sum(total / count for total, count in parts) / len(parts)
        loss.backward()
        for name, param in trained.items():
            main[name].grad = param.grad.float() if param.grad is not None else torch.zeros_like(main[name])
        zeros = sum(int((param.grad == 0).sum()) for param in main.values())
        norm = torch.nn.utils.clip_grad_norm_(main.values(), CLIP)
        optimizer.step()
        with torch.no_grad():
            for name, param in trained.items():
                param.copy_(main[name])
        whole = {name: main.get(name, param).detach().clone() for name, param in model.named_parameters()}
        records.append(Record(float(loss), float(norm), zeros, whole))
    return records


def _whole_loss(model: torch.nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    losses = model(batch, torch.arange(batch.shape[1]).expand_as(batch), None, labels=batch).float()
    mask = loss_mask(batch)
    return (losses * mask).sum(), mask.sum()


def _whole_optimizer(case: Case, main: dict[str, torch.Tensor]) -> torch.optim.Optimizer:
    groups = [{"params": [param], "weight_decay": 0.0 if param.dim() == 1 else WEIGHT_DECAY} for param in main.values()]
    if case.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=LR, momentum=0.9)
    return torch.optim.AdamW(groups, lr=LR, eps=ADAM_EPS)
