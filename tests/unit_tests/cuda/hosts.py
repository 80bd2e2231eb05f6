"""Starts ranks as several hosts on one machine, so that more ranks than there are GPUs can talk NCCL.

NCCL refuses two ranks on one GPU of one host. It knows a host by NCCL_HOSTID where that is set; so each of several
torchrun agents has its own. Ranks of a host talk as ever, those of different hosts through loopback sockets.

    python -m tests.unit_tests.cuda.hosts --hosts 2 --ranks-per-host 4 --timeout 150 pretrain_gpt.py FLAGS
"""

import argparse
import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO

#: Time for the other agents to end by themselves after one has failed.
PEER_GRACE_S = 10.0
#: An agent ends its ranks politely, and after 30 seconds by force; they are in sessions of their own.
END_S = 40.0


@dataclasses.dataclass(frozen=True)
class Hosts:
    """So many agents on this machine, with so many ranks each."""

    count: int
    ranks: int

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], output: IO | None) -> "Agents":
        """torchrun's agents running `arguments`; standard output and errors go to `output`, or where ours go."""
        port = _free_port()
        agents = []
        for host in range(self.count):
            command = [sys.executable, "-m", "torch.distributed.run", *self._flags(host, port), *arguments]
            agents.append(
                subprocess.Popen(
                    command,
                    env={**environment, **self._variables(host)},
                    stdout=output,
                    stderr=subprocess.STDOUT if output else None,
                    start_new_session=True,
                )
            )
        return Agents(agents)

    def _flags(self, host: int, port: int) -> list[str]:
        if self.count == 1:
            return ["--standalone", "--nproc-per-node", str(self.ranks)]
        flags = ["--nnodes", str(self.count), "--node-rank", str(host), "--nproc-per-node", str(self.ranks)]
        return [*flags, "--master-addr", "127.0.0.1", "--master-port", str(port)]

    def _variables(self, host: int) -> dict[str, str]:
        if self.count == 1:
            return {}
        loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")
        return {
            "NCCL_HOSTID": f"host{host}",
            "NCCL_SOCKET_IFNAME": loopback,
            "NCCL_NET": "Socket",
            "NCCL_IB_DISABLE": "1",
            # NVLink between hosts would make them one again.
            "NCCL_MNNVL_ENABLE": "0",
            "GLOO_SOCKET_IFNAME": loopback,
        }


class Agents:
    """Running agents; whatever happens inside `with`, neither they nor their ranks stay behind."""

    def __init__(self, processes: Sequence[subprocess.Popen]) -> None:
        self._processes = processes

    def __enter__(self) -> "Agents":
        return self

    def __exit__(self, *_: object) -> None:
        running = [process for process in self._processes if process.poll() is None]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + END_S
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def failure(self, timeout_s: float) -> str | None:
        """The reason for which a run that is over is no success; None if it is one."""
        deadline = time.monotonic() + timeout_s
        is_failing = False
        while any(process.poll() is None for process in self._processes) and time.monotonic() < deadline:
            if not is_failing and any(process.poll() for process in self._processes):
                is_failing, deadline = True, min(deadline, time.monotonic() + PEER_GRACE_S)
            time.sleep(0.1)
        codes = [process.poll() for process in self._processes]
        if any(codes):
            return f"the agents' exit codes are {codes}"
        return f"no end within {timeout_s:g} s" if None in codes else None


def hosts_of(ranks: int, gpus: int) -> Hosts | None:
    """Placement of ranks on a machine with so many GPUs; None: there is none. Only 8 ranks share GPUs, two each."""
    if gpus >= ranks:
        return Hosts(1, ranks)
    return Hosts(2, 4) if ranks == 8 and gpus >= 4 else None


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def main() -> int:
    """Runs a script with arguments; the exit code is 0 if all agents end well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds [600]")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="what torchrun gets: a script and its arguments")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with Hosts(options.hosts, options.ranks_per_host).start(options.script, os.environ, None) as agents:
        failure = agents.failure(options.timeout)
    if failure:
        sys.stderr.write(f"{failure}\n")
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
