"""The connections of all agents to the coordinator are reset, again and again, and their processes live: nothing is lost, no step is
done again, and nobody is replaced."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sqlite3
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.faults.scripts.strike import Fault
from tests.faults.trained import Trained

pytestmark = pytest.mark.slow

Train = Callable[..., Trained]
Reference = Callable[[str], Trained]
BEHIND_PROXY = Path(__file__).parent / "scripts" / "behind_proxy"
RESET = struct.pack("ii", 1, 0)


class Proxy:
    """Before the coordinator of the job that runs in ``folder``. A fault named ``cut NAME`` resets all connections, and makes the mark
    ``done NAME``; when there is to be a fault ``open NAME`` nobody gets through before that has struck."""

    def __init__(self, folder: Path, faults: list[Fault]) -> None:
        self._folder = folder
        self._cuts = {fault.name.removeprefix("cut ") for fault in faults if fault.name.startswith("cut ")}
        self._opens = {fault.name.removeprefix("open ") for fault in faults if fault.name.startswith("open ")}
        self._closed = ""
        self._writers: set[asyncio.StreamWriter] = set()
        self.connections = 0
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._started.wait(60)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._main = self._loop.create_task(self._serve())
            self._loop.run_until_complete(self._main)
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # aborted transports are closed in the loop's next round

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        try:
            while True:
                await asyncio.sleep(0.002)
                for marks in self._folder.glob("train-*/marks"):
                    self._obey(marks)
        finally:
            server.close()
            self._cut()

    def _obey(self, marks: Path) -> None:
        for name in sorted(self._cuts):
            if self._writers and (marks / f"cut {name}").exists():  # once somebody is back from the cut before
                self._cuts.remove(name)
                self._closed = name if name in self._opens else ""
                self._cut()
                (marks / f"done {name}").write_text("{}")
        if self._closed and (marks / f"open {self._closed}").exists():
            self._closed = ""

    def _cut(self) -> None:
        for writer in self._writers:
            with contextlib.suppress(OSError):  # it is closed already
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        self._writers.add(writer)
        if self._closed:
            self._cut()
        try:
            above = await self._coordinator()
            ends.append(above[1])
            self._writers.add(above[1])
            self.connections += 1
            async with asyncio.TaskGroup() as both:
                both.create_task(_pump(reader, above[1]))
                both.create_task(_pump(above[0], writer))
        except* (OSError, RuntimeError):
            pass
        finally:
            for end in ends:
                self._writers.discard(end)
                end.transport.abort()

    async def _coordinator(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while True:
            for endpoint in self._folder.glob("run-*/endpoint.json"):
                port = urlsplit(json.loads(endpoint.read_text())["url"]).port
                return await asyncio.open_connection("127.0.0.1", port)
            await asyncio.sleep(0.01)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


@pytest.fixture
def behind_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[Fault]], Proxy]]:
    made: list[Proxy] = []

    def make(faults: list[Fault]) -> Proxy:
        proxy = Proxy(tmp_path, faults)
        made.append(proxy)
        monkeypatch.setenv("RACKRUN_TEST_PROXY", str(proxy.port))
        return proxy

    yield make
    for proxy in made:
        proxy.close()


def cut(name: str, place: str, rank: int, step: int | None = None, after: str = "") -> Fault:
    """``rank`` waits until the connections are reset."""
    return Fault(name=f"cut {name}", place=place, rank=rank, step=step, after=after, then="wait", until=f"done {name}")


CUTS = [
    cut("forward", "between steps", 2, 3),
    cut("backward", "backward", 1, 4),
    cut("for long", "backward", 0, 6),
    Fault(name="open for long", place="between steps", rank=0, step=9, then="mark"),
    cut("late", "backward", 3, 11),
]
IN_A_RECOVERY = [
    cut("before", "backward", 0, 4),
    Fault(name="lost", place="backward", rank=1, step=7),
    cut("parking", "before await_plan", 0, after="lost"),
    # The others need not wait for rank 0 to come there: on a device, each comes when its own has returned.
    Fault(name="ahead", place="before join", rank=2, after="lost", then="wait", until="done parking"),
    cut("joining", "before join", 2, after="ahead"),
    cut("after", "backward", 3, 10, after="cut joining"),
]


@pytest.mark.parametrize("mode", ["ddp", pytest.param("fsdp", marks=pytest.mark.stories)])
def test_connections_that_are_reset_cost_nothing(
    mode: str, train: Train, reference: Reference, behind_proxy: Callable[[list[Fault]], Proxy]
) -> None:
    wanted = reference(mode)
    proxy = behind_proxy(CUTS)
    trained = train(mode, CUTS, spares=2, trays=2, path=BEHIND_PROXY)
    trained.assert_same_training(wanted, CUTS)
    assert (trained.recoveries, trays_lost(trained)) == ([], []), trained
    assert proxy.connections >= 2 + 2 * 4, "both agents have come back each time"


@pytest.mark.stories
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_connections_that_are_reset_in_a_recovery_cost_nothing_more(
    mode: str, train: Train, reference: Reference, behind_proxy: Callable[[list[Fault]], Proxy]
) -> None:
    wanted = reference(mode)
    behind_proxy(IN_A_RECOVERY)
    trained = train(mode, IN_A_RECOVERY, spares=2, trays=2, path=BEHIND_PROXY)
    trained.assert_same_training(wanted, IN_A_RECOVERY)
    assert trays_lost(trained) == [], trained
    (recovery,) = trained.recoveries
    assert [lost["rank"] for lost in recovery["lost"]] == [1], trained


def trays_lost(trained: Trained) -> list[tuple[int, bytes]]:
    with contextlib.closing(sqlite3.connect(trained.ran.out_dir / "journal.sqlite")) as journal:
        return journal.execute("SELECT at_ms, body FROM events WHERE name = 'TrayLost'").fetchall()
