"""Checks of tensor-parallel parameters, before and after they are sharded."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from megatron_fsdp.dtensor.shard_spec import spec_of
from megatron_fsdp.machine.collectives import largest
from megatron_fsdp.machine.mesh import FSDPDistributedIndex
from megatron_fsdp.machine.torch_compat import local_tensor
from megatron_fsdp.runtime.unit import ManagedParam
from megatron_fsdp.state.param_tags import is_expert_param
from megatron_fsdp.state.tensor_parallel import TpPartition, local_part


def check_tensor_parallel(params: Iterable[ManagedParam], index: FSDPDistributedIndex) -> None:
    """Checks that every parameter is cut over tensor-parallel ranks in a way that the engine can describe.

    Raises:
        ValueError: a parameter is a DTensor on another mesh than the tensor-parallel one, or the meshes of data- and
            tensor-parallel ranks cannot be combined, or ranks would have parts of different sizes.
        NotImplementedError: experts have other tensor-parallel ranks than the rest of the model.
    """
    if index.tp_dim is not None and index.expt_device_mesh is not None:
        _check_experts(index)
    for param in params:
        is_expert = is_expert_param(param.unsharded)
        mesh = index.get_submesh(index.tp_dim, is_expert) if index.tp_dim is not None else None
        if isinstance(param.unsharded, DTensor):
            _check_dtensor(param.fqn, param.unsharded, mesh)
        if mesh is not None and mesh.size() > 1:
            _check_mesh(index, is_expert)
            _check_cut(param.fqn, param.unsharded, TpPartition.of(param.unsharded, mesh.get_group()))


def _check_experts(index: FSDPDistributedIndex) -> None:
    meshes = (index.get_submesh((index.tp_dim,), is_expert).mesh for is_expert in (False, True))
    dense, experts = (mesh.flatten().tolist() for mesh in meshes)
    if dense != experts:
        raise NotImplementedError(
            f"tp_dim={index.tp_dim!r} has ranks {dense} in device_mesh and {experts} in expt_device_mesh; experts need "
            "the same tensor-parallel ranks as the rest of the model."
        )


def _check_mesh(index: FSDPDistributedIndex, is_expert: bool) -> None:
    dims = tuple(dim for dim in (index.dp_outer_dim, index.dp_shard_dim, index.tp_dim) if dim is not None)
    if (*dims, is_expert) not in index.mesh_library:
        name, mesh = "expt_device_mesh" if is_expert else "device_mesh", index.get_root_mesh(is_expert)
        assert mesh is not None, "the parameters lie on it"
        raise ValueError(
            f"{name} with dimensions {mesh.mesh_dim_names} has no sub-mesh of {dims}, over "
            "which tensor-parallel parameters would be sharded; give it dimensions in this order, none inside another."
        )


def _check_dtensor(name: str, param: DTensor, mesh: DeviceMesh | None) -> None:
    if mesh is None:
        raise ValueError(f"{name} is a DTensor; pass tp_dim, the dimension of device_mesh that it is spread over.")
    expected = dist.get_process_group_ranks(mesh.get_group())
    if param.device_mesh.ndim != 1 or param.device_mesh.mesh.flatten().tolist() != expected:
        raise ValueError(
            f"{name} is a DTensor on {param.device_mesh}; expected one on the tensor-parallel dimension alone, ranks "
            f"{expected}: call parallelize_module with device_mesh[tp_dim]."
        )
    if type(param.placements[0]) not in (Replicate, Shard):
        raise ValueError(f"{name} is a DTensor placed as {param.placements[0]}; expected Replicate or Shard.")


def _check_cut(name: str, param: nn.Parameter, cut: TpPartition) -> None:
    dim, part = cut.cut_dim, local_part(param).shape
    if dim is None:
        return
    if not dim < len(part):
        raise ValueError(f"{name} of shape {tuple(part)} has no dim {dim}, over which its tags say it is split.")
    if isinstance(param, DTensor) and param.shape[dim] % cut.size:
        raise ValueError(
            f"{name} of shape {tuple(param.shape)} is cut in dim {dim} over {cut.size} tensor-parallel ranks, "
            "which does not give them equal parts; pad it to a multiple."
        )
    if part[dim] % cut.blocks:
        raise ValueError(f"{name} has partition_stride={cut.blocks}, which does not divide dim {dim} of {tuple(part)}.")


@torch.no_grad()
def check_replicas(params: Mapping[str, nn.Parameter]) -> None:
    """Checks that what is not cut over tensor-parallel ranks is the same on all of them. **Collective** over the mesh.

    Args:
        params: all sharded parameters by name, as they were initialised.

    Raises:
        ValueError: on every rank, if one differs.
    """
    by_mesh: dict[DeviceMesh, dict[str, bool]] = {}
    for name, param in params.items():
        spec = spec_of(param)
        if spec.cut_over_tp.size > 1 and not spec.cut_over_tp.is_cut:
            mine = local_tensor(param).contiguous().view(-1).view(torch.uint8)
            first = mine.clone()
            dist.broadcast(first, group=spec.cut_over_tp.group, group_src=0)
            by_mesh.setdefault(spec.mesh, {})[name] = not torch.equal(mine, first)
    for mesh, differs in by_mesh.items():
        found = largest(list(differs.values()), mesh.get_all_groups(), mesh.device_type)
        wrong = list(itertools.compress(differs, found))
        if wrong:
            raise ValueError(
                f"{', '.join(wrong[:5])}{' and others' if len(wrong) > 5 else ''} should be whole on every "
                "tensor-parallel rank, but their values differ there. Seed tensor-parallel ranks alike, or say that a "
                "parameter is split: by parallelize_module, or by the tags tensor_model_parallel and partition_dim."
            )
