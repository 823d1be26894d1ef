"""The agent's and the coordinator's real ends of a link, over connections that break at random: each message comes once and in order."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from pathlib import Path

import pytest

from rackrun.agent.tray.uplink import Uplink
from rackrun.coordinator.journal.journal_writer import Journal
from rackrun.coordinator.server.agent_link import AgentLink
from rackrun.link.channel import frame
from rackrun.protocol.agent_config import AgentConfig, LogConfig, ScriptConfig
from rackrun.protocol.commands import DismissTray, WorkerCommand
from rackrun.protocol.events import WorkerFinished
from rackrun.protocol.ids import Incarnation, SlotId, TrayId
from tests.coordinator.fakes import TOKEN, Coordinator, ScriptedCore, coordinator, joined

TRAY = TrayId("tray-00")


class Ends:
    """Of one link: what was said into each, and what came out of the other."""

    def __init__(self, c: Coordinator, uplink: Uplink, link: AgentLink, core: ScriptedCore, obeyed: list[int]) -> None:
        self._c, self._uplink, self._core, self._obeyed = c, uplink, core, obeyed
        self.link = link
        self.events = self.commands = 0

    def say_up(self, count: int) -> None:
        for _ in range(count):
            event = WorkerFinished(slot=SlotId("tray-00/0"), incarnation=Incarnation(self.events))
            self._uplink.event(event)
            self.events += 1

    def say_down(self, count: int, size: int) -> None:
        for _ in range(count):
            command = DismissTray(tray=TRAY, because=f"{self.commands} {'x' * size}")
            self._c.driver._send_to(frame(command), [TRAY])
            self.commands += 1

    def cut(self) -> None:
        if isinstance(self.link._transport, asyncio.WriteTransport):
            self.link._transport.abort()

    @property
    def came(self) -> tuple[list[int], list[int]]:
        return [e.incarnation for e in self._core.heard if isinstance(e, WorkerFinished)], self._obeyed

    @property
    def lost(self) -> list[str]:
        return [name for name in self._core.names() if name == "TrayLost"]


async def disturb(ends: Ends, draw: random.Random) -> None:
    for _ in range(draw.randrange(20, 150)):
        match draw.randrange(6):
            case 0:
                ends.say_up(draw.choice([1, 3, 100, 400]))
            case 1:
                ends.say_down(draw.choice([1, 3, 100]), draw.choice([1, 1, 20_000]))
            case 2:
                with contextlib.suppress(ConnectionError, RuntimeError):
                    await ends.link.ping()
            case 3 if draw.random() < 0.5:
                ends.cut()
            case 4:
                await asyncio.sleep(draw.choice([0.0, 0.005, 0.03]))
            case _:
                await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(12))
async def test_whenever_connections_break_each_message_comes_once_and_in_order(
    seed: int, journal: Journal, tmp_path: Path
) -> None:
    core, obeyed = ScriptedCore(), list[int]()

    def obey(command: WorkerCommand) -> None:
        assert isinstance(command, DismissTray)
        obeyed.append(int(command.because.split()[0]))

    async with coordinator(core, journal) as c:
        with socket.create_server(("127.0.0.1", 0)) as here:
            hello = joined(at=f"127.0.0.1:{here.getsockname()[1]}")
            uplink = Uplink(config(c.url, tmp_path), hello, obey, 60.0)
            running = asyncio.create_task(uplink.run())
            async with asyncio.timeout(60):
                while not isinstance(link := c.driver.link_of(TRAY), AgentLink) or not link._reachable:  # noqa: ASYNC110 - nobody is told
                    await asyncio.sleep(0)
            ends = Ends(c, uplink, link, core, obeyed)
            await disturb(ends, random.Random(seed))
            async with asyncio.timeout(60):
                while not running.done() and list(map(len, ends.came)) != [ends.events, ends.commands]:  # noqa: ASYNC110 - nobody is told
                    await asyncio.sleep(0.005)
            assert not ends.lost, core.heard[-1]
            assert ends.came == ([*range(ends.events)], [*range(ends.commands)])
            running.cancel()
            await asyncio.wait((running,))


def config(url: str, folder: Path) -> AgentConfig:
    return AgentConfig(
        run_id="job-1",
        tray=TRAY,
        slots=4,
        coordinator=url,
        token=TOKEN,
        advertise="127.0.0.1",
        script=ScriptConfig(path="none.py"),
        logs=LogConfig(directory=str(folder)),
        grace_s=0.2,
        lease_s=600.0,
    )
