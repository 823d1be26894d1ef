"""The agents of this host: forked before there is a loop or a thread, watched, replaced, and ended with the job.

The launcher is a subreaper, so a dead agent's children become its own (a dead agent's fork server kills the workers
with it). A tray is given to a new agent only when no process of the old one is alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence

import msgspec

from rackrun.agent.host import proc
from rackrun.agent.worker_start.fork_server import unsound_because
from rackrun.link.process import descriptor_limit
from rackrun.protocol.agent_config import JOB_IS_OVER, AgentConfig
from rackrun.protocol.ids import TrayId

__all__ = ["LocalAgents"]

_REFUSED = 2
_LEFTOVERS_S = 10.0
_POLL_S = 0.02
_KILL_S = 5.0


class LocalAgents:
    """The agents of this host."""

    def __init__(self, configs: Sequence[AgentConfig]) -> None:
        self._configs = {config.tray: config for config in configs}
        self._pids: dict[TrayId, int] = {}
        self._restarts_left = {config.tray: config.max_restarts for config in configs}
        self._on_lost: Callable[[TrayId, int, str], None] = lambda _tray, _pid, _because: None
        self._on_none_left: Callable[[str], None] = lambda _because: None
        self._replacing: set[asyncio.Task[None]] = set()
        self._pidfds: dict[TrayId, int] = {}
        self._ending = False
        self.beside: Callable[[], Sequence[int]] = lambda: ()
        """Returns processes of the launcher that belong to no agent."""
        self._changed = asyncio.Event()
        self.exit_codes: dict[TrayId, int] = {}

    def template(self) -> bytes:
        """The configuration of another agent of this job as JSON, without the fields that differ from tray to tray."""
        config = next(iter(self._configs.values()))
        return msgspec.json.encode(msgspec.structs.replace(config, topology=b"", slot_env=(), simulated=False))

    def start(self) -> None:
        """Fork the agents, in the main thread, before its event loop runs.

        If a preload has left threads or initialised CUDA, agents are started as new interpreters instead, which takes
        seconds.
        """
        proc.adopt_orphans()
        if unsound_because():
            for tray, config in self._configs.items():
                self._pids[tray] = _spawn_agent(config)
            return
        gc.collect()
        gc.freeze()  # a collection would copy the pages that agents share with us
        for tray, config in self._configs.items():
            sys.stdout.flush()
            sys.stderr.flush()
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                _become_agent(config, parent)
            self._pids[tray] = pid

    def watch(self, on_lost: Callable[[TrayId, int, str], None], on_none_left: Callable[[str], None]) -> None:
        """Watch the agents on the running loop.

        ``on_lost`` is called when an agent has ended, with its tray and process id. ``on_none_left`` is called when no
        agent is left and none will be started again.
        """
        self._on_lost = on_lost
        self._on_none_left = on_none_left
        for tray, pid in self._pids.items():
            self._watch(tray, pid)

    def fence(self, tray: TrayId, pid: int) -> None:
        """Kill the agent of a tray that is lost for the job, because it may only be stopped and could continue later.
        Nothing is done if the process is not this launcher's: then another agent acted for the tray, and this
        launcher's may still take its place."""
        if self._pids.get(tray) == pid:
            os.kill(pid, signal.SIGKILL)  # not reaped yet, so the number is still its own

    def how_ended(self, tray: TrayId, pid: int) -> str:
        """Return how a tray's agent ended, even if `watch` has not seen it yet; "": it runs, or is not this launcher's."""
        if self._pids.get(tray) != pid:
            return ""
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # `_exited` reaps it
        if found is None:
            return ""
        exited = found.si_code == os.CLD_EXITED
        return _how_ended(found.si_status if exited else None, None if exited else found.si_status)

    def returns(self, tray: TrayId) -> bool:
        """Return whether the tray's agent is started again if it is lost."""
        return not self._ending and self._restarts_left.get(tray, 0) > 0

    async def end(self, grace_s: float) -> None:
        """Wait until all agents have exited after the job's end, at most ``grace_s`` seconds; then kill all descendants
        of this process."""
        await self.exited(grace_s)
        self.kill()

    async def exited(self, grace_s: float) -> None:
        """Wait until all agents have exited after the job's end, at most ``grace_s`` seconds."""
        self._ending = True
        for task in self._replacing:
            task.cancel()
        for pid in self._pids.values():
            os.kill(pid, JOB_IS_OVER)  # an agent without a connection cannot learn it otherwise
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._pids:
                    self._changed.clear()
                    await self._changed.wait()

    def kill(self) -> None:
        """SIGKILL all descendants of this process, and reap them."""
        self._ending = True
        block = proc.kill_tree(os.getpid())
        for tray in list(self._pidfds):
            self._unwatch(tray)
        while _reap_any(block=block):
            pass
        self._pids.clear()

    def _watch(self, tray: TrayId, pid: int) -> None:
        self._pidfds[tray] = pidfd = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(pidfd, self._exited, tray)

    def _unwatch(self, tray: TrayId) -> None:
        pidfd = self._pidfds.pop(tray)
        with contextlib.suppress(RuntimeError):  # no loop any more
            asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)

    def _exited(self, tray: TrayId) -> None:
        self._unwatch(tray)
        pid = self._pids.pop(tray)
        _, status = os.waitpid(pid, 0)
        code, number = proc.exit_code_and_signal(status)
        self.exit_codes[tray] = code if code is not None else 128 + (number or 0)
        self._changed.set()
        if self._ending:
            return
        if code in {0, _REFUSED}:
            self._restarts_left[tray] = 0
        because = _how_ended(code, number)
        self._on_lost(tray, pid, because)
        if self._restarts_left[tray] > 0:
            self._restarts_left[tray] -= 1
            task = asyncio.create_task(self._replace(tray), name=f"replace-{tray}")
            self._replacing.add(task)
            task.add_done_callback(self._replacing.discard)
        elif not self._pids and not self._replacing:
            self._on_none_left(f"{tray}: {because}")

    async def _replace(self, tray: TrayId) -> None:
        """Start another agent once no process of the old one is alive, which takes as long as freeing its workers'
        memory."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _LEFTOVERS_S
        while leftovers := _children([*self._pids.values(), *self.beside()]):
            for pid in leftovers:
                if loop.time() > deadline:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                _reap(pid)
            await asyncio.sleep(_POLL_S)
        self._pids[tray] = _spawn_agent(self._configs[tray])
        self._watch(tray, self._pids[tray])


def _how_ended(code: int | None, number: int | None) -> str:
    if not number:
        return f"its agent exited with code {code}"
    try:
        return f"its agent was killed by {signal.Signals(number).name}"
    except ValueError:  # a real-time signal has no name
        return f"its agent was killed by signal {number}"


def _become_agent(config: AgentConfig, parent: int) -> None:
    """Run the agent in a forked child. Never returns."""
    from rackrun.agent.main import run_agent

    code = 70
    try:
        os.setsid()  # the terminal's Ctrl-C is for the launcher alone
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        code = run_agent(config, parent=parent)
    except BaseException:  # noqa: BLE001 - this process must end here, whatever happened, and say why
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _spawn_agent(config: AgentConfig) -> int:
    """Start an agent as a new interpreter, from a process with threads. Its configuration is in a memory file."""
    fd = os.memfd_create("rackrun-agent-config", 0)
    try:
        os.write(fd, msgspec.json.encode(config))
        os.lseek(fd, 0, os.SEEK_SET)
        process = subprocess.Popen(
            [sys.executable, "-m", "rackrun.agent", f"fd:{fd}", "--parent", str(os.getpid())],
            pass_fds=(fd,),
            start_new_session=True,
        )
        descriptor_limit.give_back(process.pid)
        process.returncode = 0  # reaped through its pidfd
        return process.pid
    finally:
        os.close(fd)


def _children(known: Iterable[int]) -> list[int]:
    """Return this process's children that are not known: orphans of an agent that died."""
    ours = set(known)
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            found = [int(text) for text in file.read().split()]
    except OSError:  # a kernel that does not list them
        found = proc.children(os.getpid())
    return [pid for pid in found if pid not in ours]


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _reap_any(*, block: bool) -> bool:
    try:
        pid, _ = os.waitpid(-1, 0 if block else os.WNOHANG)
    except ChildProcessError:
        return False
    return pid > 0
