"""The process of a rank of a pool: it joins the others and answers jobs."""

import faulthandler
import gc
import io
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

REPO_ROOT = Path(__file__).resolve().parents[3]
ENGINE_SOURCE = REPO_ROOT / "megatron/core/distributed/fsdp/src"

#: In this time the ranks must meet after a job.
CHECK_TIMEOUT_S = 10.0


#: A rank that gets this signal writes what its threads are doing; a hang can be understood afterwards.
STACKS_SIGNAL = signal.SIGUSR1


def stacks_file(store: str, rank: int) -> Path:
    """File for the stacks."""
    return Path(f"{store}.stacks{rank}")


@dataclass(frozen=True)
class Failure:
    """The error that one rank raised."""

    type_names: tuple[str, ...]
    """Qualified names of the exception's class and of its bases."""

    message: str
    traceback: str


def import_paths() -> list[str]:
    """Folders that a process needs on its path to import the tests, the engine and the training package."""
    return [str(REPO_ROOT), str(ENGINE_SOURCE)]


def serve(pipe: connection.Connection, rank: int, world_size: int, store: str) -> None:
    """Answers jobs until the parent says None or goes away."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    sys.path[:0] = [path for path in import_paths() if path not in sys.path]

    import torch
    import torch.distributed as dist

    from megatron_fsdp.runtime import linear_grads

    stacks = stacks_file(store, rank).open("w")
    faulthandler.register(STACKS_SIGNAL, file=stacks)
    torch.set_num_threads(1)
    linear_grads.LEAST_NUMEL = 1  # the tests' models are small
    _share_gloo_device()
    # torchrun's variables, for code that reads them.
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=120)
    )
    _collect()
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        reply = _answer(message)
        if reply is None:
            break
        pipe.send_bytes(reply)
    # Tearing the group down waits for peers that may be gone; the process ends anyway.
    os._exit(0)


def _share_gloo_device() -> None:
    """Lets all groups of this process talk through one gloo device instead of one each.

    A device's thread looks for news every 10 ms as long as it lives: a hundred groups that no test uses any more, times
    the ranks of all pools, kept both cores of a small machine in its kernel for half of the time.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    device = dist.ProcessGroupGloo.create_default_device()

    class SharingGloo(dist.ProcessGroupGloo):
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
            options = dist.ProcessGroupGloo._Options()
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = SharingGloo


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _answer(message: bytes) -> bytes | None:
    """The pickled result or Failure of one job; None for the wish to end."""
    fn = None
    try:
        job = pickle.loads(message)
        if job is None:
            return None
        fn, args = job
        _reset_process_state()
        result = _dumps(fn(*args))
    except BaseException as error:  # noqa: BLE001  (a rank survives whatever a job raises, SystemExit included)
        names = tuple(qualified_name(cls) for cls in type(error).__mro__)
        result = pickle.dumps(Failure(names, str(error), traceback.format_exc()))
    if fn is not check_default_group:
        _collect()
    return result


def _collect() -> None:
    """Frees what a job left in cycles; what it imported lives for ever, so that the next collection can skip it.

    Walking through all modules again would take 30 ms a job, and 90 with megatron-core.
    """
    global _module_count
    gc.collect()
    if len(sys.modules) != _module_count:
        _module_count = len(sys.modules)
        gc.freeze()


_module_count = 0


def _reset_process_state() -> None:
    import torch

    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)


def _dumps(value: Any) -> bytes:
    """Pickles by value: no shared memory, and of a view only its own elements."""
    import torch

    class ByValue(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if type(obj) is torch.Tensor and obj.untyped_storage().nbytes() > obj.numel() * obj.element_size():
                return obj.detach().clone(memory_format=torch.contiguous_format).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return NotImplemented

    stream = io.BytesIO()
    ByValue(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return stream.getvalue()


def set_up(setup: Callable[[], None] | None) -> None:
    """The pool's first job: what its ranks need before any other."""
    if setup is not None:
        setup()


def check_default_group(job_id: int) -> int:
    """Number of groups besides the default one, in which all ranks must meet. **Collective.**"""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        raise RuntimeError("the job destroyed the default process group")
    _forget_mcore_groups()
    met = torch.full((1,), job_id)
    dist.all_reduce(met, async_op=True).wait(timedelta(seconds=CHECK_TIMEOUT_S / 2))
    if met.item() != job_id * dist.get_world_size():
        raise RuntimeError("the job left collectives behind: the default process group is out of step")
    return len(dist.distributed_c10d._world.pg_map) - 1


def _forget_mcore_groups() -> None:
    parallel_state: Any = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is not None and parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()


def qualified_name(cls: type) -> str:
    """With its module."""
    return f"{cls.__module__}.{cls.__qualname__}"
