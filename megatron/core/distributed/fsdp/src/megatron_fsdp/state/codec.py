"""Codecs: they store compute weights and refresh them from main weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_fsdp.machine.torch_compat import foreach_copy_
from megatron_fsdp.state.tensor_parallel import local_part


@dataclasses.dataclass(frozen=True)
class Shard:
    """One parameter's rows on this rank, in the main weight and in the compute weight."""

    param: torch.nn.Parameter
    main: torch.Tensor
    """(rows, *rest) in the main dtype; zero rows where the rank owns none."""
    stored: torch.Tensor
    """The same rows of the compute weight, in the codec's storage dtype."""
    first_row: int
    """Number of the first of these rows in the parameter."""
    atom_rows: int
    """Rows from row 0 on that lie on one rank together: as `WeightCodec.atom_rows` asks, or 1 if that cost too much."""


class WeightCodec:
    """Storage format of a group's compute weights. Stateless; one object serves every group.

    This one stores weights in the parameter's own dtype, and of a DTensor its local tensor: encoding is a cast. Other
    formats override it.
    """

    is_cast = True
    """Encoding is a cast to the storage dtype, element by element: a gather may do it on its way, and a weight in the
    main weight's dtype is the main weight itself. Without it they never share memory."""

    def handles(self, param: torch.nn.Parameter) -> bool:
        """True if this codec stores `param`."""
        return type(local_part(param.data)) is torch.Tensor

    def storage_dtype(self, param: torch.nn.Parameter) -> torch.dtype:
        """Dtype in which the weight is stored and gathered, one element per parameter element."""
        return param.dtype

    def atom_rows(self, param: torch.nn.Parameter) -> int:
        """Rows that should stay on one rank for this format. Where that would be mostly padding they are cut, and
        `Shard.atom_rows` tells `encode` so: ranks then agree on the values that a block of rows has in common."""
        return 1

    def initial_main(self, param: torch.nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
        """The full main weight to start from, shaped as the parameter (a DTensor: as its local tensor).

        It may have another dtype than the main weight's, `dtype`, to which it is cast.
        """
        return local_part(param.data)

    def bind(self, param: torch.nn.Parameter, view: torch.Tensor) -> None:
        """Makes `view`, of full shape, the parameter's storage from now on."""
        # Through `.data`: a Parameter made of the view would share its version counter with the buffer, and autograd
        # would take the re-gather before backward for an in-place change of a saved tensor.
        local_part(param).data = view

    def encode(self, shards: Sequence[Shard], groups: Sequence[dist.ProcessGroup]) -> None:
        """Refreshes the compute weights from the main weights. **Collective** over `groups` if the format needs
        statistics of whole parameters: every rank calls it with the same parameters in the same order, and the maximum
        over a parameter is the maximum over `groups`, one after the other."""
        pairs = [(shard.stored, shard.main) for shard in shards if shard.main.numel()]
        pairs = [(stored, main) for stored, main in pairs if stored.data_ptr() != main.data_ptr()]  # not one memory
        if pairs:
            foreach_copy_([stored for stored, _ in pairs], [main for _, main in pairs])


_CODECS = [WeightCodec()]


def register_codec(codec: WeightCodec) -> None:
    """Adds a codec; later ones are asked first."""
    _CODECS.insert(0, codec)


def codec_for(param: torch.nn.Parameter) -> WeightCodec:
    """The codec that stores `param`.

    Raises:
        ValueError: no codec knows the parameter's class.
    """
    for codec in _CODECS:
        if codec.handles(param):
            return codec
    raise ValueError(
        f"no weight codec handles parameters of class {type(param.data).__name__}; "
        "shard a plain Parameter, or register a codec for this class."
    )
