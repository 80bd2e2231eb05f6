"""A process of each rank that writes its files while the rank goes on; it has no model, no GPU and no group.

torch's own asynchronous saving by processes needs a group of host-side communicators over them, which then plan; here
the ranks have planned, and what is left is bytes.
"""

import contextlib
import enum
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron.training.checkpoint.format.filesystem import Disk
from megatron.training.checkpoint.save.shared_memory import SharedMemory, Staged, StagedValues, stage
from megatron.training.checkpoint.save.storage_writer import CheckpointWriter, Written, done

_NICENESS = 10
"""So that training's own threads go first, as in megatron-core."""
_END_TIMEOUT_S = 10.0
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from megatron.training.checkpoint.save.async_writer import serve; serve(int(sys.argv[2]), int(sys.argv[3]))"
)


class Progress(enum.IntEnum):
    """Progress of a writing process; the largest of all ranks is the progress of the save."""

    WRITTEN = 0
    WRITING = 1
    FAILED = 2


class WriterProcess:
    """The process, as its rank sees it; started at once, so that it is ready when it is needed."""

    def __init__(self) -> None:
        self.memory = SharedMemory()
        self._pipe, theirs = Pipe()
        descriptors = (theirs.fileno(), self.memory.descriptor)
        with _signals_blocked():
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), *map(str, descriptors)],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                # Without GPUs torch makes no context on one, which would cost memory there.
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            )
        theirs.close()
        self._answer: Written | OSError | None = None  # Received and not asked for yet.

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def start(self, staged: Staged) -> None:
        """Hands over what is to be written. Raises OSError if the process is gone."""
        try:
            self._pipe.send(staged)
        except OSError as error:
            raise self._gone() from error

    def progress(self) -> "Progress":
        """Progress of the files that were handed over last."""
        if self._answer is None and self._pipe.poll():
            self._answer = self._receive()
        if self._answer is None:
            return Progress.WRITING
        return Progress.FAILED if isinstance(self._answer, OSError) else Progress.WRITTEN

    def result(self) -> Written:
        """The files and places written; waits for them. Raises OSError if writing failed, or if the process is gone."""
        answer, self._answer = self._answer or self._receive(), None
        if isinstance(answer, OSError):
            raise answer
        return answer

    def _receive(self) -> Written | OSError:
        try:
            return self._pipe.recv()
        except (EOFError, OSError):
            return self._gone()

    def close(self) -> None:
        """Ends the process, whatever it is doing."""
        self._pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_TIMEOUT_S)
        self._process.kill()
        self._process.wait()
        self.memory.close()

    def _gone(self) -> OSError:
        code = self._process.wait(_END_TIMEOUT_S)
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return OSError(f"the process that writes checkpoints (pid {self.pid}) ended {how}")


class AsyncCheckpointWriter(CheckpointWriter):
    """Copies the values of a plan and has them written; `write_data` returns when they may change."""

    def __init__(self, folder: Path, process: WriterProcess) -> None:
        super().__init__(folder, Disk())
        self._process = process

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        """Starts writing. Raises OSError if there is no memory for the copy, or no process."""
        self._process.start(stage(Path(self.path), plan, planner, self._process.memory))
        return done([])


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """A process that is started inside never gets the signals that mean its rank, which waits for it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---- below: what runs in the process ----


def serve(pipe_descriptor: int, memory_descriptor: int) -> None:
    """Writes what it is told to until its rank ends or closes the pipe."""
    os.nice(_NICENESS)
    pipe, memory = Connection(pipe_descriptor), SharedMemory(memory_descriptor)
    requests: SimpleQueue[Staged] = SimpleQueue()
    threading.Thread(target=_receive, args=(pipe, requests), daemon=True).start()
    while True:
        pipe.send(_written(requests.get(), memory))


def _receive(pipe: Connection, requests: "SimpleQueue[Staged]") -> None:
    """Ends the process with its rank, even in the middle of a file."""
    while True:
        try:
            requests.put(pipe.recv())
        except (EOFError, OSError):
            os._exit(0)


def _written(staged: Staged, memory: SharedMemory) -> Written | OSError:
    try:
        memory.attach(staged.memory_nbytes)
        writer = CheckpointWriter(staged.folder, Disk())
        writer.write_data(staged.plan, StagedValues(staged, memory))
        return writer.written
    except OSError as error:
        return error
    except Exception as error:  # noqa: BLE001  (the rank must hear of whatever it was)
        return OSError(f"{type(error).__name__}: {error}")
