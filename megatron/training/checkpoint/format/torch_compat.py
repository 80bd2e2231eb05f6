"""Private names of torch that checkpoints need; no other file of the training loop uses any."""

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo

__all__ = ["FakeTensorMode", "StorageInfo"]
