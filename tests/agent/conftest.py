"""A real agent, forked as the launcher forks it, and a coordinator made of a list and a dict."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import textwrap
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar
from uuid import uuid4

import msgspec
import pytest
from aiohttp import WSMsgType, web

from rackrun.agent.host import proc
from rackrun.agent.main import run_agent
from rackrun.agent.worker_start.fork_server import preload
from rackrun.link.channel import frame
from rackrun.link.reliable_messages import NumberedLink, Welcome
from rackrun.protocol.agent_config import AgentConfig, LogConfig, ScriptConfig
from rackrun.protocol.commands import FenceWorker, ReleaseWorkers, StartWorker, StopJob, Worker, WorkerCommand
from rackrun.protocol.events import ScriptFailure, TrayJoined, WorkerExited
from rackrun.protocol.ids import Generation, Incarnation, Rank, SlotId, TrayId
from rackrun.protocol.wire import Upward, decode_upward
from tests.topology.conftest import fake, library

__all__ = ["fake", "library"]

TOKEN = "a-token"
TRAY = TrayId("tray-0")
DEADLINE_S = 100.0  # a loaded machine is slow; pytest's own limit is just above

preload()


Found = TypeVar("Found")
Said = TypeVar("Said")


class Timed:
    """A message, and when it came."""

    def __init__(self, message: Upward) -> None:
        self.message = message
        self.at = time.monotonic()


class FakeCoordinator:
    def __init__(self) -> None:
        self.received: list[Timed] = []
        self.queries: list[dict[str, str]] = []
        self.ends: list[WSMsgType] = []
        """What each connection ended with."""
        self.refuse: tuple[int, str] | None = None
        self.url = ""
        self.deaf = False
        """It answers no ping."""
        self._arrived = asyncio.Condition()
        self.numbered = NumberedLink()
        self.session = ""
        self._socket: web.WebSocketResponse | None = None
        self._transport: asyncio.BaseTransport | None = None
        self._runner: web.AppRunner | None = None
        self._port = 0

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/agent", self._agent)
        self._runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        if self._socket is not None:
            await self._socket.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def hang_up(self) -> None:
        assert self._socket is not None
        await self._socket.close()

    def cut(self) -> None:
        """The agent's connection breaks: no word of farewell."""
        assert isinstance(self._transport, asyncio.WriteTransport)
        self._transport.abort()

    async def send(self, *commands: WorkerCommand) -> None:
        assert self._socket is not None
        packet = self.numbered.pack([frame(command) for command in commands])
        with contextlib.suppress(ConnectionError):  # else: it is sent again when the agent comes back
            await self._socket.send_bytes(packet)

    async def wait(
        self, wanted: Callable[[Upward], bool], what: str = "message", timeout_s: float = DEADLINE_S
    ) -> Timed:
        """The first message that is wanted, come or to come."""

        def find() -> Timed | None:
            return next((timed for timed in self.received if wanted(timed.message)), None)

        async with self._arrived:
            try:
                await asyncio.wait_for(self._arrived.wait_for(lambda: find() is not None), timeout_s)
            except TimeoutError:
                raise AssertionError(f"no {what}; got {[timed.message for timed in self.received]}") from None
        found = find()
        assert found is not None
        return found

    async def said(self, kind: type[Said], wanted: Callable[[Said], bool] = lambda _: True, what: str = "") -> Said:
        """The first message of this kind that is wanted."""
        timed = await self.wait(lambda m: isinstance(m, kind) and wanted(m), what or kind.__name__)
        assert isinstance(timed.message, kind)
        return timed.message

    async def joined(self) -> TrayJoined:
        message = (await self.wait(lambda m: isinstance(m, TrayJoined), "TrayJoined")).message
        assert isinstance(message, TrayJoined)
        return message

    async def exit_of(self, incarnation: int) -> WorkerExited:
        return (await self.timed_exit_of(incarnation))[0]

    async def timed_exit_of(self, incarnation: int) -> tuple[WorkerExited, float]:
        timed = await self.wait(
            lambda m: isinstance(m, WorkerExited) and m.incarnation == incarnation, f"exit of {incarnation}"
        )
        assert isinstance(timed.message, WorkerExited)
        return timed.message, timed.at

    async def connections(self, count: int) -> None:
        async with self._arrived:
            await asyncio.wait_for(self._arrived.wait_for(lambda: len(self.queries) >= count), DEADLINE_S)

    async def ended(self, count: int) -> None:
        async with self._arrived:
            await asyncio.wait_for(self._arrived.wait_for(lambda: len(self.ends) >= count), DEADLINE_S)

    def _resumed(self, query: Mapping[str, str]) -> list[bytes]:
        """What is to be sent again."""
        if "resume" in query:
            return self.numbered.resume(int(query["received"]))
        self.numbered, self.session = NumberedLink(), uuid4().hex
        return []

    async def _agent(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == f"Bearer {TOKEN}"
        if self.refuse is not None:
            return web.Response(status=self.refuse[0], text=self.refuse[1])
        if request.query.get("resume", self.session) != self.session:
            return web.Response(status=409, text="it has been given up")
        socket = web.WebSocketResponse(autoping=not self.deaf)
        await socket.prepare(request)
        self._socket, self._transport = socket, request.transport
        again = self._resumed(request.query)
        welcome = Welcome(session=self.session, received=self.numbered.received)
        await socket.send_str(msgspec.json.encode(welcome).decode())
        for packet in again:
            await socket.send_bytes(packet)
        async with self._arrived:
            self.queries.append(dict(request.query))
            self._arrived.notify_all()
        while (message := await socket.receive()).type in (WSMsgType.BINARY, WSMsgType.PING):
            if message.type is WSMsgType.PING:
                continue
            async with self._arrived:
                self.received.extend(Timed(decode_upward(body)) for body in self.numbered.unpack(message.data))
                self._arrived.notify_all()
            if self.numbered.owes_much:
                await socket.send_bytes(self.numbered.pack())
        async with self._arrived:
            self.ends.append(message.type)
            self._arrived.notify_all()
        return socket


class Rig:
    """One agent, its coordinator, and where its output goes."""

    def alive(self, pid: int) -> bool:
        return alive(pid)

    async def all_gone(self, pids: list[int]) -> None:
        await all_gone(pids)

    def fork(self, run: Callable[[], int]) -> int:
        return fork(run)

    async def eventually(self, find: Callable[[], Found | Literal[False] | None], what: str) -> Found:
        return await eventually(find, lambda: what)

    def __init__(self, coordinator: FakeCoordinator, folder: Path) -> None:
        self.coordinator = coordinator
        self.folder = folder
        self.agent = 0
        self.out = folder / "stdout"
        self.err = folder / "stderr"
        self.store = ""

    def script(self, text: str) -> ScriptConfig:
        path = self.folder / "script.py"
        path.write_text(textwrap.dedent(text))
        return ScriptConfig(path=str(path))

    async def start(self, script: ScriptConfig | str, **config: Any) -> TrayJoined:
        """Fork an agent for the script, and wait until it has joined."""
        self.launch(script, **config)
        joined = await self.coordinator.joined()
        self.store = joined.store
        return joined

    def launch(self, script: ScriptConfig | str, **config: Any) -> None:
        self.agent = fork(lambda: self.run(script, **config))

    def run(self, script: ScriptConfig | str, **config: Any) -> int:
        for path, fd in ((self.out, 1), (self.err, 2)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
        os.environ["RACKRUN_TEST_RIG"] = str(self.folder)  # a mark of all below
        return run_agent(self.config(script, **config), parent=os.getppid())

    def config(self, script: ScriptConfig | str, **config: Any) -> AgentConfig:
        settings = {
            "run_id": "a-run",
            "tray": TRAY,
            "slots": 4,
            "coordinator": self.coordinator.url,
            "token": TOKEN,
            "advertise": "127.0.0.1",
            "script": self.script(script) if isinstance(script, str) else script,
            "logs": LogConfig(directory=str(self.folder / "logs")),
            "grace_s": 0.2,
            "lease_s": 600.0,  # nobody here pings
            **config,
        }
        return AgentConfig(**settings)

    async def start_worker(self, index: int = 0, incarnation: int = 1, **fields: Any) -> None:
        await self.coordinator.send(self.start_command(index, incarnation, **fields))

    def start_command(self, index: int = 0, incarnation: int = 1, **fields: Any) -> StartWorker:
        settings = {
            "slot": SlotId(f"{TRAY}/{index}"),
            "incarnation": Incarnation(incarnation),
            "spare": False,
            "rank": Rank(index),
            "world_size": 4,
            "generation": Generation(1),
            "store": self.store,
            **fields,
        }
        return StartWorker(**settings)

    async def fence(self, index: int, incarnation: int) -> None:
        slot = SlotId(f"{TRAY}/{index}")
        await self.coordinator.send(FenceWorker(slot=slot, incarnation=Incarnation(incarnation), because="a test"))

    async def release(self, *workers: tuple[str, int]) -> None:
        await self.coordinator.send(
            ReleaseWorkers(workers=tuple(Worker(SlotId(slot), Incarnation(which)) for slot, which in workers))
        )

    async def end(self, exit_code: int = 0) -> int:
        """StopJob; returns the agent's exit code."""
        await self.coordinator.send(StopJob(exit_code=exit_code, because="a test"))
        return await self.agent_exit()

    async def agent_exit(self) -> int:
        status = await reaped(self.agent)
        self.agent = 0
        return os.waitstatus_to_exitcode(status)

    async def line(self, wanted: str, path: Path | None = None) -> str:
        """The first line of the workers' output that holds ``wanted``."""
        path = path or self.out

        def find() -> str | None:
            text = path.read_text(errors="replace") if path.exists() else ""
            return next((line for line in text.splitlines(keepends=True) if wanted in line and line[-1] == "\n"), None)

        found = await eventually(find, lambda: f"{wanted!r} in {path}: {self.what_happened()}")
        return found.rstrip("\n")

    def what_happened(self) -> str:
        """What the workers have said, what the coordinator was told, and what each process does now."""
        lines = [file.read_text(errors="replace") for file in (self.out, self.err) if file.exists()]
        lines += [str(told.message) for told in self.coordinator.received[-20:]]
        for pid in (self.agent, *proc.descendants(self.agent)) if self.agent else ():
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:80]
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                lines.append(f"{pid} {state} {Path(f'/proc/{pid}/wchan').read_text()} {command}")
        return "\n".join(lines)

    async def number(self, name: str) -> int:
        """What the script printed as ``name=number``."""
        return int((await self.line(f"{name}=")).partition(f"{name}=")[2].split()[0])


def failure_of(ended: WorkerExited) -> ScriptFailure:
    assert ended.failure is not None
    return ended.failure


async def eventually(find: Callable[[], Found | Literal[False] | None], what: Callable[[], str]) -> Found:
    """Poll what has no event of its own, such as another process's file, until it is there."""
    deadline = time.monotonic() + DEADLINE_S
    while not (found := find()):
        assert time.monotonic() < deadline, what()
        await asyncio.sleep(0.005)
    return found


def fork(run: Callable[[], int]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            signal.set_wakeup_fd(-1)
            asyncio._set_running_loop(None)  # a launcher forks before it has a loop
            code = run()
        except BaseException:  # noqa: BLE001 - a child of the test run must not go on as one
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


async def reaped(pid: int) -> int:
    pidfd = os.pidfd_open(pid)
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(pidfd, over.set)
    try:
        await asyncio.wait_for(over.wait(), DEADLINE_S)
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
    return os.waitpid(pid, 0)[1]


async def all_gone(pids: list[int]) -> None:
    """These processes, whoever their parent is, end."""

    def ended() -> bool:
        return not any(alive(pid) for pid in pids)

    await eventually(ended, lambda: f"still there: {[pid for pid in pids if alive(pid)]}")


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


@pytest.fixture
async def coordinator(orphans_are_seen: None) -> AsyncIterator[FakeCoordinator]:
    fake = FakeCoordinator()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def rig(coordinator: FakeCoordinator, tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(coordinator, tmp_path)
    yield rig
    if rig.agent:
        below = proc.descendants(rig.agent)
        os.kill(rig.agent, signal.SIGKILL)
        os.waitpid(rig.agent, 0)
        await all_gone(below)


@pytest.fixture
def orphans_are_seen() -> Iterator[None]:
    """What escapes a dead agent becomes ours, and so the leak check sees it."""
    proc.adopt_orphans()
    yield
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
