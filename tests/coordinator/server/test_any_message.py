"""Nothing that a peer says ends the job, kills the journal's thread, or costs anybody but the one who said it."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rackrun.coordinator.journal.journal_writer import Journal
from rackrun.coordinator.server.agent_link import AgentLink, ProtocolViolation
from rackrun.coordinator.server.http_server import Server
from rackrun.coordinator.shell.driver import Driver
from rackrun.core.machine.control_plane import ControlPlane
from rackrun.protocol.events import StopRequested, TrayDescribed
from rackrun.protocol.ids import TrayId
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.wire import Telemetry, decode_command, decode_upward, encode
from tests.coordinator.fakes import Onlooker, joined
from tests.coordinator.messages_drawn import upward


class SilentLink:
    def __init__(self, tray: str, host: str) -> None:
        self.tray, self.host, self.pid, self.joined, self.slots = TrayId(tray), host, 1, False, 0

    check = AgentLink.check

    def join(self, host: str, slots: int, listens_at: str) -> None:
        self.joined, self.host, self.slots = True, host, slots

    def send(self, data: bytes) -> None:
        pass


@settings(max_examples=100)
@given(upward())
def test_every_message_can_be_sent_and_what_comes_out_is_one_of_its_kind(message: Any) -> None:
    try:
        received = decode_upward(encode(message))
    except msgspec.ValidationError:
        return  # a field of another type than declared, where an object stands for "anything"
    assert type(received) is type(message)
    assert decode_upward(encode(received)) == received or "nan" in repr(received)


@settings(max_examples=100)
@given(
    st.binary(max_size=64)
    | upward()
    .map(encode)
    .flatmap(lambda data: st.integers(0, len(data)).map(lambda cut: data[:cut] + b"\xff" + data[cut + 1 :]))
)
@example(b"\x91" * 100_000)
@example(b"\xdd\xff\xff\xff\xff")
@example(
    msgspec.msgpack.encode({"event": "StopRequested", "because": "XX", "exit_code": 1}).replace(b"XX", b"\xff\xfe")
)
def test_bytes_that_are_no_message_raise_one_kind_of_error(data: bytes) -> None:
    for decode in (decode_upward, decode_command):
        with contextlib.suppress(msgspec.MsgspecError):
            decode(data)


SAID = st.lists(upward(but=(StopRequested,)), min_size=1, max_size=25)


@settings(max_examples=15)
@given(SAID)
@example([TrayDescribed(tray=TrayId("tray-00"), topology=b"\x00")])
def test_whatever_an_agent_says_the_job_goes_on(said: list[Any]) -> None:
    asyncio.run(_say_to_a_real_core(said))


@pytest.mark.stories
@settings(max_examples=400)
@given(SAID)
def test_whatever_an_agent_says_for_long_the_job_goes_on(said: list[Any]) -> None:
    asyncio.run(_say_to_a_real_core(said))


async def _say_to_a_real_core(said: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "journal.sqlite", run_id="job-1")
        driver = Driver(
            ControlPlane(JobConfig(trays_min=1, trays_max=2, spares=1)), journal, run_id="job-1", observer=Onlooker()
        )
        server = Server(driver, run_id="job-1", token="t" * 20)
        try:
            driver.begin()
            for tray in ("tray-00", "tray-01"):
                link = SilentLink(tray, tray)
                server._event(link, joined(tray, tray))  # type: ignore[arg-type]
                if tray == "tray-00":
                    speaker = link
            for message in said:
                try:
                    received = decode_upward(encode(message))
                    if isinstance(received, Telemetry):
                        if server._is_believed(speaker, received):  # type: ignore[arg-type]
                            driver.receive_telemetry([received])
                    else:
                        server._event(speaker, received)  # type: ignore[arg-type]
                except (msgspec.MsgspecError, ProtocolViolation):
                    continue
                assert driver.over is None or "contradicts itself" not in driver.over.because, (driver.over, message)
            driver.status()
            driver.metrics.text()
            assert journal.dead == ""
            assert await asyncio.to_thread(journal.flush)
            assert journal.rows_lost == 0
        finally:
            await server._runner.cleanup()
            driver.close()
            journal.close()
