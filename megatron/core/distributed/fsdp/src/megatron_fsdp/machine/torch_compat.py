"""Every private torch symbol that the engine touches, each with its reason and the versions it was seen in."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard


def graph_task() -> int:
    """The number of the graph task that runs now, another one than that around it; -1 outside (torch 2.1 to 2.13)."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """True inside an autograd graph task: a forward that runs now is a recomputation."""
    return graph_task() != -1


#: A context in which no tensor subclass overrides functions: reading an attribute of one that does takes a microsecond
#: elsewhere.
without_overrides = torch.DisableTorchFunctionSubclass


def only_accumulates(leaf: torch.Tensor) -> bool:
    """True if what the node that runs now gives to `leaf` goes into `leaf.grad`, and nobody else sees it.

    Hooks do (`_backward_hooks`: torch 1.0 to 2.13; the other one's: torch 2.1 to 2.13), and callers of
    `torch.autograd.grad`: in such a task torch refuses to answer for a leaf that is asked for. The leaf's node is found
    among the running one's successors; `get_gradient_edge(leaf)` takes 5 microseconds (`_current_autograd_node`,
    `next_functions`, `_will_engine_execute_node`: torch 2.1 to 2.13).
    """
    with without_overrides():
        if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
            return False
    edges = getattr(torch._C._current_autograd_node(), "next_functions", ())
    node = next((node for node, _ in edges if getattr(node, "variable", None) is leaf), None)
    try:
        return node is not None and torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return False


def is_transformed(input: torch.Tensor) -> bool:
    """A transform of torch.func runs, or `input` carries a forward-mode derivative.

    (`_are_functorch_transforms_active`: torch 2.1 to 2.13.)
    """
    return torch._C._are_functorch_transforms_active() or forward_ad.unpack_dual(input).tangent is not None


def on_backward_end(callback: Callable[[], None]) -> None:
    """Runs `callback` when the current graph task is finished; call it inside one.

    `Variable._execution_engine.queue_callback` is what DistributedDataParallel uses (torch 1.0 to 2.13).
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor of which `tensor` is a view to autograd, if any (torch 1.0 to 2.13)."""
    return tensor._base


def version_of(value: object) -> int | None:
    """Number of changes in place to a tensor; None for values that have no such counter (torch 1.0 to 2.13)."""
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else None


def premul_sum(factor: float) -> dist.ReduceOp:
    """NCCL's sum of inputs multiplied by `factor`; it has no other constructor (torch 1.13 to 2.13)."""
    return dist._make_nccl_premul_sum(factor)


def storage_id(tensor: torch.Tensor) -> int:
    """A number that tells storages apart even while they are empty, as a data pointer does not.

    The object that stands for a storage in Python lives as long as the storage (torch 2.1 to 2.13).
    """
    return id(tensor.untyped_storage())


#: The local tensor object of a DTensor itself; `to_local()` gives an alias, and torch DCP reads attributes of the
#: object. In native code: an optimizer's step asks for hundreds.
local_tensor = operator.attrgetter("_local_tensor")


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` when it is there: a DTensor may hold the promise of a collective's result, which `wait` keeps."""
    return tensor.wait() if hasattr(tensor, "wait") else tensor


def dtensor_spec(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size, dtype: torch.dtype
) -> DTensorSpec:
    """The spec that `DTensor.from_local` gives to contiguous tensors of these placements (torch 2.4 to 2.13)."""
    return DTensorSpec(
        mesh, placements, tensor_meta=TensorMeta(shape, torch.empty(shape, device="meta").stride(), dtype)
    )


#: (local tensor, description) to a DTensor over that very object in 1 microsecond, where `DTensor.from_local` takes 16
#: and DTensor's own `__init__`, which does nothing, 1 more (`DTensor.__new__`: torch 2.4 to 2.13).
dtensor_over: Callable[[torch.Tensor, DTensorSpec], DTensor] = functools.partial(
    DTensor.__new__, DTensor, requires_grad=False
)


def sharded_dim(placement: Placement) -> int | None:
    """The tensor dim that a placement cuts; None if it is not a Shard.

    `_StridedShard` (an axis that is cut after axes to its right) is private. It is a `Shard` by inheritance in some
    versions only (not in torch 2.13), and neither `isinstance` nor `is_shard()` alone is right in all (2.11 to 2.13).
    """
    return placement.dim if isinstance(placement, (Shard, _StridedShard)) else None


def split_factor(placement: Placement) -> int:
    """Pieces into which axes to the right have cut the dim before this placement does; 1 for a plain Shard."""
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else 1


def strided_shard(dim: int, factor: int) -> Placement:
    """A Shard that is cut after axes to its right whose sizes multiply to `factor` (torch 2.4 to 2.13)."""
    return _StridedShard(dim, split_factor=factor)


#: Keeps a function out of what torch.compile traces. `torch.compiler.disable` would import the compiler at once; this
#: does so when the function is first called, as torch's own optimizers do (torch 2.1 to 2.13).
uncompiled = _disable_dynamo


@functools.cache
def multiplies_into(dtype: torch.dtype, wider: torch.dtype, device_type: str) -> bool:
    """Matrices of `dtype` can be multiplied into one of the dtype `wider` without being rounded.

    (`out_dtype`: torch 2.11 to 2.13, on CUDA.)
    """
    if device_type != "cuda" or wider is not torch.float32 or dtype not in (torch.bfloat16, torch.float16):
        return False
    factor = torch.ones(16, 16, dtype=dtype, device=device_type)
    try:
        product = multiply_into(factor, factor, factor.new_empty(16, 16, dtype=wider))
    except (TypeError, NotImplementedError, RuntimeError):
        return False
    return bool((product == 16).all())


def multiply_into(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`left @ right`, written to `out`, which may be of a wider dtype where `multiplies_into` says so."""
    if left.dtype is out.dtype:
        return torch.mm(left, right, out=out)
    return torch.mm(left, right, out_dtype=out.dtype, out=out)


# torch's own optimizers batch their work with these; they have no public spelling (torch 2.0 to 2.13).
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_norm = torch._foreach_norm


def multiply_each(tensors: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiplies all of these by a scalar in place; those of low precision are rounded once, and the scalar never.

    On CUDA `_foreach_mul_` and `mul_` round a scalar tensor to the other's dtype first (torch 2.0 to 2.13): a factor in
    bf16 may be off by 1/256. A tensor with a dim takes part in type promotion, so the product is computed in its dtype.
    """
    wide = []
    for tensor in tensors:
        if tensor.itemsize < torch.float32.itemsize:
            tensor.unsqueeze(0).mul_(factor.reshape(1))  # one by one: on a CPU each takes a temporary copy
        else:
            wide.append(tensor)
    if wide:
        torch._foreach_mul_(wide, factor)


def zero_each(tensors: Iterable[torch.Tensor]) -> None:
    """Makes all of these zero at once; there may be none (`_foreach_zero_`: torch 2.0 to 2.13)."""
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if tensors:
        torch._foreach_zero_(tensors)


# Renamed in torch 2.13, where the names that 2.11 and 2.12 have warn.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def memberships() -> int:
    """Groups of which this rank is a member: torch names one that only its own ranks make by this (2.1 to 2.13)."""
    return len(dist.distributed_c10d._world.pg_names)


def nccl_backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend of `group` for CUDA tensors; it makes and registers memory pools (torch 2.7 to 2.13)."""
    return group._get_backend(device)


def symmetric_memory(nbytes: int, device: torch.device, group: dist.ProcessGroup) -> tuple[torch.Tensor, Any]:
    """`nbytes` of `device` that all ranks of `group` can read, and the handle through which they do. **Collective**.

    Freed when both are gone; torch's caching allocator does not count them. `_symmetric_memory.empty()` would take them
    from a pool that keeps them (torch 2.13), so this does what it does without one.

    Raises:
        RuntimeError: the devices do not reach each other, or memory cannot be shared between these processes.
    """
    # Not above: the module registers dozens of operators, which nobody else here needs.
    from torch.distributed import _symmetric_memory  # noqa: PLC0415

    tensor = _symmetric_memory._SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
    return tensor, _symmetric_memory.rendezvous(tensor, group)
