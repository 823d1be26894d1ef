"""Several processes with a communicator between them, as rackrun's workers have one, without agents: to be killed and stopped one by one."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.gpu.jobs import readable
from benchmarks.gpu.registry import Context
from benchmarks.gpu.scripts.common import DOUBLE, DOUBLE_AT, doubled, show_stacks_in_time
from rackrun.agent.host import proc

__all__ = ["Rank", "Ranks"]

_NAP_S = 0.002
_CUDA_DEVICE = "/dev/nvidia-uvm"
"""A process that has it open has initialised CUDA, and a fork of it cannot use CUDA. The threads of a store or a watchdog are nothing to a fork."""
Answer = dict[str, Any]


class Rank:
    """In a rank's own process, what its function is given."""

    def __init__(self, order: dict[str, Any]) -> None:
        import torch

        self.rank: int = order["rank"]
        self.size: int = order["size"]
        self.folder = Path(order["folder"])
        self.given: dict[str, Any] = order["given"]
        self.device = torch.device(order["device"])
        self.deadline: float = order["deadline"]
        self.wait_for("address")
        self.address = (self.folder / "address").read_text()

    def communicator(self, name: str, size: int | None = None) -> Any:
        from benchmarks.gpu import seams

        return seams.communicator(self.address, name, self.rank, size or self.size, self.device)

    def say(self, mark: str) -> None:
        """Whoever waits for it goes on."""
        (self.folder / f"mark-{mark}").touch()

    def said(self, mark: str) -> bool:
        return (self.folder / f"mark-{mark}").exists()

    def wait_for(self, mark: str) -> None:
        _wait_for(self.folder, mark, self.deadline)

    def meet(self, name: str, ranks: Sequence[int] | None = None) -> None:
        """Returns when all ranks have called it, or those of ``ranks``."""
        self.say(f"{name}-{self.rank}")
        for other in range(self.size) if ranks is None else ranks:
            self.wait_for(f"{name}-{other}")

    def say_bytes(self, mark: str, data: bytes) -> None:
        (self.folder / f"bytes-{mark}").write_bytes(data)
        self.say(mark)

    def wait_for_bytes(self, mark: str) -> bytes:
        self.wait_for(mark)
        return (self.folder / f"bytes-{mark}").read_bytes()


class Ranks:
    """``with Ranks(context, function, 2) as ranks``: ``function`` of this package ("shared:ring") in ``count`` processes."""

    def __init__(
        self,
        context: Context,
        function: str,
        count: int,
        given: dict[str, Any] | None = None,
        *,
        env: dict[str, str] | None = None,
        double: str = "late",
    ) -> None:
        self._context, self._function, self._count = context, function, count
        self._given, self._env, self._double = given or {}, env or {}, double
        self._processes: list[subprocess.Popen[bytes] | _Fork] = []
        self.folder = context.folder

    def __enter__(self) -> Ranks:
        import torch.distributed as dist

        from benchmarks.gpu import seams  # noqa: F401 - for ranks that are forks

        faulthandler.cancel_dump_traceback_later()  # its thread would be missing to a fork that ends it
        self._processes += [self._start(rank) for rank in range(self._count)]
        show_stacks_in_time()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (self.folder / "address").write_text(f"127.0.0.1:{self._store.port}")
        self.say("address")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _start(self, rank: int) -> subprocess.Popen[bytes] | _Fork:
        context = self._context
        order = {
            "function": self._function,
            "rank": rank,
            "size": self._count,
            "folder": str(self.folder),
            "given": self._given,
            "device": "cpu" if context.dry else f"cuda:{rank if context.mode == 'box' else 0}",
            "deadline": context.deadline,
        }
        alone = {
            "NCCL_HOSTID": f"rackrun-kit-{rank}",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_IB_DISABLE": "1",
        } if context.mode == "one" else {}  # fmt: skip
        played = {DOUBLE: self._double} if context.dry and self._double and DOUBLE_AT.exists() else {}
        env = {**alone, **played, **self._env}
        with (self.folder / f"rank-{rank}.txt").open("wb") as output:
            if not proc.has_open(_CUDA_DEVICE):
                return _Fork(json.dumps(order), env, output.fileno())
            return subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu.ranks", json.dumps(order)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
            )

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        self._processes[rank].send_signal(number)

    def say(self, mark: str) -> None:
        (self.folder / f"mark-{mark}").touch()

    def wait_for(self, mark: str) -> None:
        """RuntimeError when it does not come, or a rank has failed meanwhile."""
        _wait_for(self.folder, mark, self._context.deadline - 2, self._look)

    def answer(self, rank: int) -> Answer:
        """What its function has returned. RuntimeError, with the end of its output, when that does not come."""
        path = self.folder / f"answer-{rank}.json"
        process = self._processes[rank]
        while not path.exists():
            ended = process.poll() is not None
            if (ended and not path.exists()) or time.monotonic() > self._context.deadline - 2:
                how = f"ended with {process.returncode}" if ended else "has not answered in time"
                raise RuntimeError(f"rank {rank} {how}: {self.said(rank)}")
            time.sleep(_NAP_S)
        told: Answer = json.loads(path.read_text())
        if "error" in told:
            raise RuntimeError(f"rank {rank}: {told['error']}")
        return told

    def answers(self) -> list[Answer]:
        return [self.answer(rank) for rank in range(self._count)]

    def said(self, rank: int, chars: int = 900) -> str:
        return readable(self.folder / f"rank-{rank}.txt", chars)

    def _look(self) -> None:
        for rank, process in enumerate(self._processes):
            if (code := process.poll()) is not None and code != -signal.SIGKILL:
                self.answer(rank)


class _Fork:
    """A rank that has what this process has imported, which takes seconds. As `subprocess.Popen`, as far as that is needed."""

    def __init__(self, order: str, env: dict[str, str], output: int) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(output, 1)
                os.dup2(output, 2)
                os.environ.update(env)
                _main(order)
            finally:
                os._exit(1)

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self) -> int | None:
        return self._reap(0)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def _wait_for(folder: Path, mark: str, deadline: float, look: Any = lambda: None) -> None:
    while not (folder / f"mark-{mark}").exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"nobody came to {mark!r} in time")
        look()
        time.sleep(_NAP_S)


def _main(given: str) -> NoReturn:
    proc.die_with(os.getppid())
    order: dict[str, Any] = json.loads(given)
    show_stacks_in_time()
    module, _, name = order["function"].partition(":")
    try:
        from benchmarks.gpu import seams

        seams.prepare()
        with doubled():
            answer = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), name)(Rank(order))
    except Exception as error:  # noqa: BLE001 - told to the check
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}"}
    path = Path(order["folder"]) / f"answer-{order['rank']}.json"
    new = path.with_suffix(".new")
    new.write_text(json.dumps(answer))
    new.rename(path)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    _main(sys.argv[1])
