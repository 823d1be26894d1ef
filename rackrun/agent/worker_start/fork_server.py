"""Fork server: a process that has imported everything and forks workers in milliseconds instead of seconds.

It has one thread, and no sockets except the one to its agent, so a fork of it is sound. Each message is one packet::

    agent  -> server   ScriptConfig, once
    agent  -> server   Boot, with descriptors: channel, page, two snapshots, stdout, stderr
    server -> agent    Forked, with a pidfd: opened before the child can have been reaped, so it names that very process
    server -> agent    Reaped

Before a worker is reaped, the rest of its session is killed: until then no other process can have its process group's
id. When the agent's end closes, for whatever reason, all descendants of the server are killed, and the server exits.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable
from typing import NoReturn

import msgspec

from rackrun.agent.host import proc
from rackrun.agent.host.tensor_files import TensorFiles
from rackrun.agent.worker_start.worker_main import exec_fresh, run_worker
from rackrun.link.process import descriptor_limit
from rackrun.link.process.import_speed import without_collections
from rackrun.protocol.agent_config import ScriptConfig
from rackrun.protocol.boot import Boot
from rackrun.protocol.commands import Worker
from rackrun.protocol.encodable import clean

__all__ = ["ForkServer", "Forked", "Reaped", "preload", "unsound_because"]

_PRELOAD = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo",  # the first AdamW would import it: 1.2 s
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
    "rackrun.worker.loop.elastic",
)
_PACKET_BYTES_MAX = 1 << 20
_FDS = 6


class Forked(msgspec.Struct, frozen=True, tag=True):
    """Answer to a Boot: the worker has been forked, or could not be."""

    worker: Worker
    pid: int
    """Process id; 0: the fork failed, see ``error``."""
    error: str = ""


class Reaped(msgspec.Struct, frozen=True, tag=True):
    """A worker has exited and was reaped."""

    worker: Worker
    status: int
    """Wait status, as `os.waitpid` returns it."""


_encode = msgspec.msgpack.Encoder().encode
_answer: msgspec.msgpack.Decoder[Forked | Reaped] = msgspec.msgpack.Decoder(Forked | Reaped)
_boot: msgspec.msgpack.Decoder[Boot] = msgspec.msgpack.Decoder(Boot)


def preload(modules: Iterable[str] = ()) -> list[str]:
    """Import the modules that workers will need. Return those that could not be imported, each with the reason."""
    with without_collections():
        failed = _import(_PRELOAD)
    return failed + _import(modules)  # whether there are collections may be a matter of a user's module


def _import(modules: Iterable[str]) -> list[str]:
    failed = []
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - a user's module may raise anything; the script will say it again
            failed.append(f"{name} ({type(error).__name__}: {error})")
    return failed


def _forget_what_others_end() -> None:
    """Drop finalizers and log handlers inherited from the parent.

    Finalizers would remove the parent's temporary directories. Log handlers would close descriptors whose numbers
    belong to other files by now, such as a process group's socket, which would end the process.
    """
    finalizers: dict[object, object] = weakref.finalize._registry  # type: ignore[attr-defined]
    finalizers.clear()
    handlers: list[object] = logging._handlerList  # type: ignore[attr-defined]
    handlers.clear()


class ForkServer:
    """The agent's side of the fork server."""

    def __init__(self, process: int, connection: socket.socket) -> None:
        self.pid = process
        self._connection = connection

    @classmethod
    def fork(cls, script: ScriptConfig) -> ForkServer:
        """Fork a server. Call it in the main thread of a process without other threads or sockets."""
        ours, theirs = _socket_pair()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                ours.detach()  # closed with the others; no destructor may close this number later
                _serve(theirs, parent)
            finally:
                os._exit(70)
        theirs.close()
        return cls._introduce(pid, ours, script)

    @classmethod
    def spawn(cls, script: ScriptConfig) -> ForkServer:
        """Start a server in a new interpreter: slower, but possible from a process with threads."""
        ours, theirs = _socket_pair()
        command = [
            sys.executable,
            "-m",
            "rackrun.agent.worker_start.fork_server",
            str(theirs.fileno()),
            str(os.getpid()),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # to ask for GPUs need not initialise CUDA
        process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), env=environment)
        descriptor_limit.give_back(process.pid)
        theirs.close()
        process.returncode = 0  # the agent reaps it itself
        return cls._introduce(process.pid, ours, script)

    @classmethod
    def _introduce(cls, pid: int, connection: socket.socket, script: ScriptConfig) -> ForkServer:
        connection.send(_encode(script))
        return cls(pid, connection)

    def fileno(self) -> int:
        """Return the descriptor of the connection to the fork server, for polling."""
        return self._connection.fileno()

    def wake(self) -> None:
        """Continue the server if it was stopped, because only it can reap the workers."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)

    def ask(self, boot: Boot, fds: tuple[int, ...]) -> None:
        """Ask the server to start a worker with these descriptors. Raises OSError if the server is gone."""
        socket.send_fds(self._connection, [_encode(boot)], list(fds))

    def answer(self) -> tuple[Forked | Reaped, int] | None:
        """Return the next answer, and its pidfd or -1. None: the server is gone."""
        try:
            packet, fds, _, _ = socket.recv_fds(self._connection, _PACKET_BYTES_MAX, 1)
        except ConnectionResetError:
            return None
        if not packet:
            return None
        return _answer.decode(packet), (fds[0] if fds else -1)

    def close(self) -> None:
        """Make the server kill its workers and exit."""
        self._connection.close()


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _PACKET_BYTES_MAX)
    return pair


# -- the server's side -------------------------------------------------------------------------------------------------
def _serve(connection: socket.socket, agent: int) -> NoReturn:
    # SIGCONT, not SIGKILL: when the agent dies we must run, even if stopped, and take everybody with us.
    proc.die_with(agent, signal.SIGCONT)
    proc.adopt_orphans()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    proc.close_other_fds([connection.fileno()])
    code, files = 0, TensorFiles()
    try:
        server = _Server(connection, files)
        gc.collect()
        gc.freeze()  # what children share they need not look through, and so copy, in every full collection
        server.run()
    except BaseException:  # noqa: BLE001 - it is told, and everybody below goes with us
        code = 70
        _say(f"failed\n{traceback.format_exc()}")
    finally:
        if proc.kill_tree(os.getpid()):
            _reap_all(files)
            files.remove()
        os._exit(code)


class _Server:
    """The server's side."""

    def __init__(self, connection: socket.socket, files: TensorFiles) -> None:
        self._connection, self._files = connection, files
        self._script = msgspec.msgpack.decode(connection.recv(_PACKET_BYTES_MAX), type=ScriptConfig)
        self._workers: dict[int, Worker] = {}
        self._pid_of: dict[int, int] = {}  # pidfd -> pid
        failed = preload(self._script.preload)
        self._fresh = unsound_because() if not self._script.no_python else ""
        for text in failed:
            _say(f"preloading failed: {text}")
        if self._fresh:
            _say(f"workers start in fresh interpreters, which is slower: {self._fresh}")

    def run(self) -> None:
        """Serve until the agent closes its end."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        while True:
            for fd, _ in poll.poll(1_000):
                if fd == self._connection.fileno():
                    packet, fds, _, _ = socket.recv_fds(self._connection, _PACKET_BYTES_MAX, _FDS)
                    if not packet:
                        return
                    self._start(_boot.decode(packet), fds, lambda pidfd: poll.register(pidfd, select.POLLIN))
                else:
                    poll.unregister(fd)
                    self._reap(fd)
            self._reap_adopted()

    def _start(self, boot: Boot, fds: list[int], watch: Callable[[int], None]) -> None:
        if self._fresh == "" and proc.thread_count() > 1:
            self._fresh = unsound_because()
        parent, worker = os.getpid(), Worker(boot.slot, boot.incarnation)
        try:
            pid = os.fork()
        except OSError as error:
            self._answer(Forked(worker, 0, f"fork: {error.strerror}"))
        else:
            if pid == 0:
                try:
                    self._become(boot, fds, parent)
                finally:
                    os._exit(70)
            pidfd = os.pidfd_open(pid)
            self._workers[pid] = worker
            self._pid_of[pidfd] = pid
            self._answer(Forked(worker, pid), pidfd)
            watch(pidfd)
        for fd in fds:
            os.close(fd)

    def _become(self, boot: Boot, fds: list[int], parent: int) -> NoReturn:
        proc.die_with(parent)
        os.setsid()  # the terminal's Ctrl-C is for the launcher; and what we start can be killed as one group
        self._connection.detach()
        channel, page, snapshot_0, snapshot_1, stdout, stderr = fds
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        proc.close_other_fds((channel, page, snapshot_0, snapshot_1))
        boot = msgspec.structs.replace(boot, channel_fd=channel, page_fd=page, snapshot_fds=(snapshot_0, snapshot_1))
        if self._fresh:
            exec_fresh(boot, self._script)
        _forget_what_others_end()
        run_worker(boot, self._script)

    def _reap(self, pidfd: int) -> None:
        pid = self._pid_of.pop(pidfd)
        worker = self._workers.pop(pid)
        proc.kill_session(pid)
        _, status = os.waitpid(pid, 0)
        os.close(pidfd)
        self._answer(Reaped(worker, status))
        self._files.reaped(pid, status)
        self._files.remove()

    def _reap_adopted(self) -> None:
        """Reap grandchildren whose parents died, which no other process would reap."""
        found = False
        with contextlib.suppress(ChildProcessError):
            while info := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if info.si_pid in self._workers:
                    break  # workers are reaped through their pidfds
                self._files.reaped(*os.waitpid(info.si_pid, 0))
                found = True
        if found:
            self._files.remove()

    def _answer(self, answer: Forked | Reaped, *fds: int) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the agent is gone: the next poll says so
            socket.send_fds(self._connection, [_encode(answer)], list(fds))


_CUDA_DEVICE = "/dev/nvidia-uvm"
"""Device that is opened when a process initialises CUDA, with or without torch's knowledge. NVML does not open it."""


def unsound_because() -> str:
    """Return why forks of this process cannot be trusted; "": they can. A fork cannot see what it has lost, so the
    parent must be asked."""
    if (threads := proc.thread_count()) > 1:
        return f"after the preloads this process has {threads} threads"
    cuda = sys.modules.get("torch.cuda")
    initialised = cuda is not None and (cuda._is_in_bad_fork() or cuda.is_initialized())
    if initialised or proc.has_open(_CUDA_DEVICE):
        return "a preload has initialised CUDA"
    return ""


def _reap_all(files: TensorFiles) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            files.reaped(*os.waitpid(-1, 0))


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # it has no reader any more
        os.write(2, clean(f"rackrun: fork server: {text}\n").encode())


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
