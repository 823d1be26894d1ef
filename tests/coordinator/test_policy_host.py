"""A user's policy runs elsewhere: whatever it does, there is one answer to each question, in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rackrun.coordinator.policy_host import PolicyHost, check
from rackrun.core.commands import AskPolicy
from rackrun.core.events import PolicyAnswered
from rackrun.core.ids import Rank, SlotId
from rackrun.core.situation import ClusterView, Decision, Failure, Rung, TrayNow
from rackrun.errors import UsageError

CHOOSE = "tests.coordinator.asked:choose"


class Asking:
    def __init__(self, answer_s: float) -> None:
        self.answers: asyncio.Queue[PolicyAnswered] = asyncio.Queue()
        self.host = PolicyHost(CHOOSE, self.answers.put_nowait, answer_s=answer_s)
        self.asked = 0

    async def ask(self, what: str, *, trays: int = 0) -> PolicyAnswered:
        self.asked += 1
        view = ClusterView(
            world_size=4,
            takeovers={Rank(3): SlotId("a/4")},
            trays=tuple(TrayNow(tray=f"tray-{number}", host="h" * 64, slots=4) for number in range(trays)),  # type: ignore[arg-type]
        )
        self.host.ask(AskPolicy(question=self.asked, failure=Failure(what=what), view=view))
        answered = await asyncio.wait_for(self.answers.get(), 20.0)
        assert answered.question == self.asked
        assert self.answers.empty()
        return answered


@pytest.fixture
async def asking(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Asking]:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    asking = Asking(answer_s=15.0)
    asking.host.start()
    yield asking
    asking.host.close()


async def test_what_the_function_returns_comes_back_and_what_goes_wrong_is_said(asking: Asking) -> None:
    swap = Decision(rung=Rung.SWAP, reason="4 ranks", targets={Rank(3): SlotId("a/4")})
    assert (await asking.ask("rank 3 lost")).decision == swap
    first = asking.host.pids()
    assert await asking.ask("leaves it") == PolicyAnswered(question=2)
    assert (await asking.ask("raises")).trouble == "failed with ValueError: no idea"
    assert (await asking.ask("exits")).trouble == "failed with SystemExit: 3"
    assert (await asking.ask("nonsense")).trouble.endswith("returned a str, not a Decision or None")
    assert "ValidationError" in (await asking.ask("wrong")).trouble
    assert (await asking.ask("prints")).decision == swap
    assert (await asking.ask("a thousand trays", trays=1000)).decision == swap
    assert asking.host.pids() == first, "one process for all of them"


async def test_one_that_dies_is_started_again(asking: Asking) -> None:
    assert (await asking.ask("dies")).trouble == "has ended its process"
    assert (await asking.ask("rank 3 lost")).decision is not None


async def test_one_that_loops_is_ended_when_its_time_is_over(asking: Asking) -> None:
    await asking.ask("it is loaded now")
    asking.host.answer_s = 0.1
    assert (await asking.ask("loops")).trouble == "gave no answer within 0.1 s"
    asking.host.answer_s = 15.0
    assert (await asking.ask("rank 3 lost")).decision is not None


@pytest.mark.parametrize(
    ("function", "because"),
    [
        ("tests.coordinator.asked:chose", "AttributeError"),
        ("tests.coordinator.nowhere:choose", "ModuleNotFoundError"),
        ("tests.coordinator.asked:not_a_function", "is a int, not a function"),
        (CHOOSE, ""),
    ],
)
def test_a_function_is_loaded_before_anything_is_started(
    function: str, because: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    if because:
        with pytest.raises(UsageError, match=because):
            check(function)
    else:
        check(function)
