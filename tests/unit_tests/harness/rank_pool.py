"""Persistent gloo ranks that run module-level functions, so that a multi-rank test costs milliseconds.

    def job(value):                       # module level: it travels by name
        return dist.get_rank() + value

    def test_something(ranks2):
        assert ranks2.run(job, 10) == [10, 11]

Starting a rank imports torch once, in a fork server; after that each job is one message down a pipe.
"""

import contextlib
import functools
import itertools
import multiprocessing
import os
import pickle
import re
import socket
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from multiprocessing import connection, forkserver
from typing import Any
from unittest import mock

from tests.unit_tests.harness.rank_process import (
    CHECK_TIMEOUT_S,
    REPO_ROOT,
    STACKS_SIGNAL,
    Failure,
    check_default_group,
    import_paths,
    qualified_name,
    serve,
    set_up,
    stacks_file,
)

__all__ = ["REPO_ROOT", "RankError", "RankPool", "import_paths", "results_agree", "setup_mcore"]

#: Modules that ranks would import one by one: torch, modules that it imports late, and those that most jobs need.
PRELOADED_MODULES = [
    "torch",
    "torch.distributed",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.utils.checkpoint",
    "torch._dynamo",
    "pytest",
    "megatron_fsdp",
    "tests.unit_tests.harness.parity",
]

MCORE_MODULES = ["megatron.core.parallel_state"]

START_TIMEOUT_S = 120.0
#: Once one rank has failed its peers usually wait for it in a collective; this is how long they get to prove otherwise.
PEER_GRACE_S = 2.0
#: Time for ranks to write the stacks of their threads.
STACKS_S = 0.3
#: Every gloo group costs threads and sockets. Destroying a job's groups would break meshes held by DTensor's caches,
#: so a pool with more leftovers than this is replaced instead.
MAX_LEFTOVER_GROUPS = 384


class RankError(RuntimeError):
    """At least one rank failed; carries each failing rank's traceback."""

    def __init__(self, world_size: int, failures: dict[int, Failure]) -> None:
        self.failures = failures
        parts = []
        for rank, failure in sorted(failures.items()):
            tag = f"[rank {rank}/{world_size}]"
            parts.append("\n".join(f"{tag} {line}" for line in failure.traceback.rstrip().splitlines()))
        super().__init__("\n" + "\n".join(parts))


class RankPool:
    """`world_size` processes joined in one gloo group; started at the first job, rebuilt after a hang or a crash."""

    def __init__(self, world_size: int, setup: Callable[[], None] | None = None) -> None:
        self.world_size = world_size
        self._setup = setup
        self._processes: list[Any] = []
        self._pipes: list[connection.Connection] = []
        self._rendezvous: tempfile.TemporaryDirectory | None = None
        self._job_ids = itertools.count(1)

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; empty while the pool is not running."""
        return [process.pid for process in self._processes]

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Results of `fn(*args)` by rank. `fn` is a module-level function; arguments and results are picklable.

        Every job starts from seed 0. Raises RankError with the tagged tracebacks if any rank raises, crashes or takes
        longer than `timeout_s`.
        """
        replies = self._run(fn, args, timeout_s)
        failures = {rank: reply for rank, reply in enumerate(replies) if isinstance(reply, Failure)}
        if failures:
            _raise(self.world_size, failures)
        return replies

    def run_expecting(
        self, exc_type: type[BaseException], match: str, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0
    ) -> None:
        """Asserts that `fn(*args)` raises `exc_type` with a message matching the regex `match` on *every* rank."""
        replies = self._run(fn, args, timeout_s)
        expected = qualified_name(exc_type)
        for rank, reply in enumerate(replies):
            tag = f"[rank {rank}/{self.world_size}]"
            if not isinstance(reply, Failure):
                raise AssertionError(f"{tag} did not raise {expected}; it returned {reply!r}")
            if expected not in reply.type_names:
                raise AssertionError(f"{tag} raised {reply.type_names[0]}, not {expected}:\n{reply.traceback}")
            if re.search(match, reply.message) is None:
                raise AssertionError(f"{tag} raised {expected} with {reply.message!r}, which does not match {match!r}")

    def close(self) -> None:
        """Ends the ranks. The next job would start new ones."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(pickle.dumps(None))
        deadline = time.monotonic() + 2.0
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _run(self, fn: Callable[..., Any], args: tuple, timeout_s: float) -> list[Any]:
        if not self._processes:
            self._start()
        replies, is_alive = self._round((fn, args), timeout_s)
        if not is_alive:
            self._kill()
            return replies
        checks, is_alive = self._round((check_default_group, (next(self._job_ids),)), CHECK_TIMEOUT_S)
        is_intact = is_alive and not any(isinstance(check, Failure) for check in checks)
        if not is_intact or max(checks) > MAX_LEFTOVER_GROUPS:
            self._kill()
        if not is_intact and not any(isinstance(reply, Failure) for reply in replies):
            return checks  # The job itself looked fine, so the broken group is the news.
        return replies

    def _start(self) -> None:
        self._rendezvous = tempfile.TemporaryDirectory(prefix="rank_pool_")
        store = os.path.join(self._rendezvous.name, "store")
        context = multiprocessing.get_context("forkserver")
        server = _fork_server(self._setup is setup_mcore)
        with (
            _start_environment(),
            mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process),
        ):
            for rank in range(self.world_size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=serve, args=(theirs, rank, self.world_size, store), daemon=True, name=f"rank{rank}"
                )
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
        replies, _ = self._round((set_up, (self._setup,)), START_TIMEOUT_S)
        failures = {rank: reply for rank, reply in enumerate(replies) if isinstance(reply, Failure)}
        if failures:
            self._kill()
            _raise(self.world_size, failures)

    def _round(self, job: tuple, timeout_s: float) -> tuple[list[Any], bool]:
        """Replies by rank and whether all ranks can take another job."""
        message = pickle.dumps(job)
        replies: dict[int, Any] = {}
        is_alive = True
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(message)
            except OSError:
                replies[rank] = self._crash(rank)
                is_alive = False
        deadline = time.monotonic() + timeout_s
        while len(replies) < self.world_size:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in replies}
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                stacks = self._stacks(waiting.values())
                for rank in waiting.values():
                    has_failed_peer = any(isinstance(reply, Failure) for reply in replies.values())
                    replies[rank] = _no_answer(timeout_s, has_failed_peer, stacks[rank])
                return [replies[rank] for rank in range(self.world_size)], False
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    replies[rank] = _unpickled(pipe.recv_bytes())
                except (EOFError, OSError):
                    replies[rank] = self._crash(rank)
                    is_alive = False
                if isinstance(replies[rank], Failure):
                    deadline = min(deadline, time.monotonic() + PEER_GRACE_S)
        return [replies[rank] for rank in range(self.world_size)], is_alive

    def _stacks(self, ranks: Collection[int]) -> dict[int, str]:
        """Stacks of the Python threads of these ranks."""
        for rank in ranks:
            with contextlib.suppress(OSError, TypeError):  # it has ended
                os.kill(self._processes[rank].pid, STACKS_SIGNAL)
        time.sleep(STACKS_S)
        files = {rank: stacks_file(os.path.join(self._rendezvous.name, "store"), rank) for rank in ranks}
        return {rank: file.read_text(errors="replace") if file.exists() else "" for rank, file in files.items()}

    def _crash(self, rank: int) -> Failure:
        process = self._processes[rank]
        process.join(1.0)
        message = f"the rank's process died with exit code {process.exitcode}"
        return Failure(("RankCrashed",), message, message)

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join(10.0)
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if self._rendezvous is not None:
            self._rendezvous.cleanup()
            self._rendezvous = None


@functools.cache
def _fork_server(has_mcore: bool) -> forkserver.ForkServer:
    """Megatron-core takes two seconds to import, and ranks without it must not have it: it has a server of its own."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload([*PRELOADED_MODULES, *(MCORE_MODULES if has_mcore else ())])
    return server


def setup_mcore() -> None:
    """Prepares a rank for tests on megatron-core, which is slow to import and needs help on CPU."""
    import megatron.core.parallel_state  # noqa: F401

    try:
        from megatron_fsdp.mcore import cpu_compat
    except ImportError:
        return
    cpu_compat.install()


def _no_answer(timeout_s: float, has_failed_peer: bool, stacks: str) -> Failure:
    why = "another rank failed" if has_failed_peer else f"timeout of {timeout_s:g} s"
    message = f"no answer ({why}); the rank was killed"
    return Failure((qualified_name(TimeoutError), "RankTimeout"), message, f"{message}\n{stacks}")


def _unpickled(reply: bytes) -> Any:
    """The result of a job; a Failure if it cannot be read here, for every other rank's reply must still be received."""
    try:
        return pickle.loads(reply)
    except Exception as error:  # noqa: BLE001  (whatever a result's class raises)
        names = tuple(qualified_name(cls) for cls in type(error).__mro__)
        return Failure(names, str(error), f"the result could not be unpickled: {traceback.format_exc()}")


def _raise(world_size: int, failures: dict[int, Failure]) -> None:
    skipped = [failure for failure in failures.values() if "_pytest.outcomes.Skipped" in failure.type_names]
    if len(skipped) == len(failures):
        import pytest

        pytest.skip(skipped[0].message)
    raise RankError(world_size, failures)


@contextlib.contextmanager
def _start_environment() -> Iterator[None]:
    """Environment that the fork server must see when it starts, undone afterwards in this process."""
    main = sys.modules["__main__"]
    overrides = {
        "PYTHONPATH": os.pathsep.join([*import_paths(), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        # These ranks talk gloo; hiding the GPUs keeps device-detecting code on the CPU.
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        # Without it gloo looks up the host's name, which fails on machines that do not know their own.
        overrides["GLOO_SOCKET_IFNAME"] = loopback[0]
    before = {name: os.environ.get(name) for name in overrides}
    os.environ.update(overrides)
    # A child would otherwise run the parent's main script again (the `pytest` executable): half a second per rank.
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def results_agree(results: Sequence[Any]) -> bool:
    """True if every rank returned the same value; tensors compare bit by bit."""
    import torch

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor):
            return torch.equal(a, b)
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        if isinstance(a, (list, tuple)):
            return len(a) == len(b) and all(map(same, a, b))
        return a == b

    return all(same(results[0], other) for other in results[1:])
