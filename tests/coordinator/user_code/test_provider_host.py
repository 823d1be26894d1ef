"""A provider runs elsewhere: whatever it does, the coordinator goes on, and hears of it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from examples import provider as example
from rackrun.coordinator.user_code.local_racks import local
from rackrun.coordinator.user_code.provider_api import RackRequest, Refused
from rackrun.coordinator.user_code.provider_child import Hello
from rackrun.coordinator.user_code.provider_host import ProviderHost, check
from rackrun.errors import UsageError
from rackrun.protocol.commands import ReleaseRack, RequestRack
from rackrun.protocol.events import RackDelivered, RackPreempted, RackRefused

ROOT = Path(__file__).resolve().parents[3]
HERE = "tests.coordinator.scripted_provider"
WAIT_S = 60.0


class Asking:
    def __init__(self, release_s: float) -> None:
        self.events: asyncio.Queue[RackDelivered | RackRefused | RackPreempted] = asyncio.Queue()
        self.notices: asyncio.Queue[str] = asyncio.Queue()
        hello = Hello(run_id="run", template=b'{"token": "secret", "tray": ""}')
        self.host = ProviderHost(
            f"{HERE}:obedient", hello, self.events.put_nowait, self.notices.put_nowait, release_s=release_s
        )

    def put(self, request: int, how: str) -> None:
        self.host.provide(RequestRack(request=request, trays=2, slots=4, because=how))

    async def ask(self, request: int, how: str) -> RackDelivered | RackRefused | RackPreempted:
        self.put(request, how)
        return await self.heard()

    async def heard(self) -> RackDelivered | RackRefused | RackPreempted:
        return await asyncio.wait_for(self.events.get(), WAIT_S)

    async def told(self) -> str:
        return await asyncio.wait_for(self.notices.get(), WAIT_S)

    def release(self, request: int) -> None:
        self.host.provide(ReleaseRack(request=request, because="enough"))


@pytest.fixture
async def asking(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Asking]:
    monkeypatch.chdir(ROOT)
    asking = Asking(release_s=WAIT_S)
    yield asking
    asking.host.close()


async def test_what_a_provider_says_comes_back_and_what_goes_wrong_is_said(asking: Asking) -> None:
    came = await asking.ask(1, "")
    assert isinstance(came, RackDelivered)
    assert came.trays[:2] == ("tray-1", "2 x 4")
    assert came.trays[2] == '{"token": "secret", "tray": "t", "slots": 3, "simulated": false}'
    assert await asking.ask(2, "refuse") == RackRefused(request=2, because="no quota")
    failed = await asking.ask(3, "raise")
    assert failed == RackRefused(request=3, because="OSError: no such queue", failed=True)
    for request, how in ((4, "a word"), (5, "nothing")):
        nonsense = await asking.ask(request, how)
        assert isinstance(nonsense, RackRefused)
        assert nonsense.failed
        assert "TypeError" in nonsense.because
    taken = await asking.ask(6, "take back")
    assert taken == RackPreempted(request=6, because="the queue", trays=("tray-1",))  # type: ignore[arg-type]
    assert isinstance(await asking.heard(), RackDelivered)
    assert isinstance(await asking.ask(7, "print"), RackDelivered)


async def test_a_request_that_hangs_holds_nothing_up_and_can_be_released(
    asking: Asking, capfd: pytest.CaptureFixture[str]
) -> None:
    asking.put(1, "hang")
    assert isinstance(await asking.ask(2, ""), RackDelivered)
    asking.release(1)
    await asking.host.end(WAIT_S)
    assert "released run-rack-1: hang, cancelled: True" in capfd.readouterr().err
    assert asking.notices.empty()


async def test_one_that_waits_is_told_that_it_is_cancelled(asking: Asking) -> None:
    asking.put(1, "wait")
    asking.release(1)
    assert await asking.heard() == RackRefused(request=1, because="it was cancelled")


async def test_when_its_process_ends_what_was_asked_has_failed_and_another_process_is_told_to_release_it(
    asking: Asking, capfd: pytest.CaptureFixture[str]
) -> None:
    await asking.ask(1, "")
    asking.put(2, "die")
    gone = [await asking.heard(), await asking.heard()]
    assert gone == [
        RackRefused(request=request, because="the provider has ended its process", failed=True) for request in (1, 2)
    ]
    asking.release(2)
    await asking.host.end(WAIT_S)
    said = capfd.readouterr().err
    assert "released run-rack-1: unknown" in said, "also at the end of the job"
    assert "released run-rack-2: unknown" in said


async def test_one_that_is_killed_while_nobody_asks_is_started_again(asking: Asking) -> None:
    await asking.ask(1, "refuse")
    (first,) = asking.host.pids()
    os.kill(first, signal.SIGKILL)
    perhaps = await asking.ask(2, "")
    assert isinstance(perhaps, RackDelivered) or perhaps.because == "the provider has ended its process"
    assert isinstance(await asking.ask(3, ""), RackDelivered)
    assert asking.host.pids() != [first]


async def test_a_release_that_hangs_ends_the_process_and_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    asking = Asking(release_s=1.0)
    try:
        await asking.ask(1, "release hangs")
        await asking.ask(2, "")
        asking.release(1)
        assert "rack 1 could not be released, see whether it is left behind" in await asking.told()
        hung = await asking.heard()
        assert hung == RackRefused(
            request=2, because="the provider hung in the release of rack 1, and was ended", failed=True
        )
    finally:
        asking.host.close()


async def test_a_release_that_raises_is_told_of(asking: Asking) -> None:
    await asking.ask(1, "release raises")
    asking.release(1)
    assert "rack 1 could not be released" in (told := await asking.told())
    assert told.endswith("OSError: it is stuck")


async def test_at_the_end_of_a_job_everything_is_released_and_no_process_is_left(
    asking: Asking, capfd: pytest.CaptureFixture[str]
) -> None:
    await asking.ask(1, "")
    await asking.ask(2, "refuse")
    asking.put(3, "wait")
    await asking.host.end(WAIT_S)
    assert not asking.host.pids()
    said = capfd.readouterr().err
    assert "released run-rack-1" in said
    assert "released run-rack-3: wait, cancelled: True" in said
    assert "run-rack-2" not in said, "it has given nothing"


async def test_a_rack_that_comes_after_its_release_is_released_at_the_end_of_the_job(
    asking: Asking, capfd: pytest.CaptureFixture[str]
) -> None:
    asking.put(1, "late")
    asking.release(1)
    assert isinstance(await asking.heard(), RackDelivered)
    await asking.host.end(WAIT_S)
    assert capfd.readouterr().err.count("released run-rack-1: late") == 2


def test_a_provider_is_loaded_once_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert check(f"{HERE}:obedient") == 7.0
    assert check(f"{HERE}:with_words:9") == 9.0
    with pytest.raises(UsageError, match="gives a NoneType, which has no request_rack"):
        check(f"{HERE}:none_at_all")
    with pytest.raises(UsageError, match="not a function that gives a provider"):
        check(f"{HERE}:NUMBER")
    with pytest.raises(UsageError, match="No module named 'nowhere'"):
        check("nowhere:provider")


def test_the_local_provider_has_so_many_racks() -> None:
    with pytest.raises(ValueError, match="'rack=2' is none of"):
        local("rack=2")
    with pytest.raises(ValueError, match="out of range"):
        local("slots=0")
    none = local("racks=0")
    with pytest.raises(Refused, match="all simulated racks are in use"):
        none.request_rack(RackRequest(number=1, name="run-rack-1", trays=1, slots=1))
    none.release("run-rack-1")
    none.close()
    cancelled = RackRequest(number=1, name="run-rack-1", trays=1, slots=1)
    cancelled.cancelled.set()
    late = local("after=3600")
    assert late.expected_s > 3600
    with pytest.raises(Refused, match="cancelled"):
        late.request_rack(cancelled)


def test_the_example_starts_an_agent_on_each_host_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "START", ("sleep", "3600"))
    shelf = example.Shelf(["node20", "node21"], tmp_path)
    first = RackRequest(number=1, name="run-rack-1", trays=1, slots=4, template=b'{"token": "secret"}')
    assert shelf.request_rack(first) == ["node20"]
    (config,) = tmp_path.iterdir()
    assert config.stat().st_mode & 0o777 == 0o600
    assert '"token": "secret"' in config.read_text()
    with pytest.raises(Refused, match="1 of 2 hosts are free, 2 are wanted"):
        shelf.request_rack(RackRequest(number=2, name="run-rack-2", trays=2, slots=4))
    shelf.release("run-rack-2")
    shelf.release("run-rack-1")
    assert not list(tmp_path.iterdir())
