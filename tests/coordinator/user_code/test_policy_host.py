"""A user's policy runs elsewhere: whatever it does, there is one answer to each question, in time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from rackrun.coordinator.user_code.policy_host import PolicyHost, check
from rackrun.errors import UsageError
from rackrun.protocol.commands import AskPolicy
from rackrun.protocol.events import PolicyAnswered
from rackrun.protocol.ids import Rank, SlotId
from rackrun.protocol.policy_types import ClusterView, Decision, Failure, Rung, TrayNow

ROOT = Path(__file__).resolve().parents[3]
CHOOSE = "tests.coordinator.scripted_policies:choose"


class Asking:
    def __init__(self, answer_s: float) -> None:
        self.answers: asyncio.Queue[PolicyAnswered] = asyncio.Queue()
        self.host = PolicyHost(CHOOSE, self.answers.put_nowait, answer_s=answer_s)
        self.asked = 0
        self.function = CHOOSE

    async def ask(self, what: str, *, trays: int = 0) -> PolicyAnswered:
        self.put(what, trays=trays)
        answered = await asyncio.wait_for(self.answers.get(), 100)
        assert answered.question == self.asked
        assert self.answers.empty()
        return answered

    def put(self, what: str, *, trays: int = 0) -> None:
        self.asked += 1
        view = ClusterView(
            world_size=4,
            takeovers={Rank(3): SlotId("a/4")},
            trays=tuple(TrayNow(tray=f"tray-{number}", host="h" * 64, slots=4) for number in range(trays)),  # type: ignore[arg-type]
        )
        self.host.ask(AskPolicy(question=self.asked, function=self.function, failure=Failure(what=what), view=view))


@pytest.fixture
async def asking(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Asking]:
    monkeypatch.chdir(ROOT)
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
    assert (await asking.ask("raises what cannot be told")).trouble == "failed with CannotBeTold: which cannot be told"
    assert len((await asking.ask("raises what is no text")).trouble) < 600
    assert (await asking.ask("forks")).decision == swap
    assert (await asking.ask("rank 3 lost")).decision == swap, "the copy takes no question away"
    assert (await asking.ask("a thousand trays", trays=1000)).decision == swap
    assert asking.host.pids() == first, "one process for all of them"


async def test_one_that_dies_is_started_again(asking: Asking) -> None:
    assert (await asking.ask("dies")).trouble == "has ended its process"
    assert (await asking.ask("rank 3 lost")).decision is not None


async def test_one_that_dies_is_missed_at_once_though_a_copy_of_it_holds_its_pipes(asking: Asking) -> None:
    assert (await asking.ask("dies, and a copy of it lives on")).trouble == "has ended its process"
    assert (await asking.ask("rank 3 lost")).decision is not None


async def test_programs_that_it_starts_do_not_get_its_pipes(asking: Asking) -> None:
    assert (await asking.ask("hands its pipes on")).trouble == ""


async def test_one_that_ends_while_nobody_asks_is_started_again_by_the_next_question(asking: Asking) -> None:
    await asking.ask("it is loaded now")
    (first,) = asking.host.pids()
    with ended(first) as waiting:
        os.kill(first, signal.SIGKILL)
        await asyncio.wait_for(waiting, 100)
    assert (await asking.ask("rank 3 lost")).trouble in ("", "has ended its process")
    assert (await asking.ask("rank 3 lost")).decision is not None
    assert asking.host.pids() != [first]


async def test_what_it_has_started_ends_with_it(asking: Asking) -> None:
    decision = (await asking.ask("starts")).decision
    assert decision is not None
    with ended(int(decision.reason)) as waiting:
        asking.host.close()
        await asyncio.wait_for(waiting, 100)


@pytest.mark.parametrize(
    ("what", "trouble"), [("answers itself", "cannot be read"), ("floods", "more than 1048576 bytes")]
)
async def test_what_is_no_answer_ends_the_process_that_gave_it(asking: Asking, what: str, trouble: str) -> None:
    assert trouble in (await asking.ask(what)).trouble
    assert (await asking.ask("rank 3 lost")).decision is not None


async def test_a_question_that_overtakes_another_is_the_only_one_that_is_answered(asking: Asking) -> None:
    await asking.ask("it is loaded now")
    first = asking.host.pids()
    asking.put("raises")
    asking.put("exits")
    assert (await asking.ask("leaves it")) == PolicyAnswered(question=4)
    assert asking.host.pids() == first, "nothing is killed for that"


async def test_one_that_loops_does_not_take_the_next_question_with_it(asking: Asking) -> None:
    await asking.ask("it is loaded now")
    asking.host.answer_s = 0.05
    asking.put("loops")
    asking.host.answer_s = 15.0
    assert (await asking.ask("rank 3 lost")).decision is not None


async def test_a_module_that_takes_long_to_load_is_not_begun_again_for_that(asking: Asking) -> None:
    first = asking.host.pids()
    asking.host.answer_s = 0.0
    assert (await asking.ask("rank 3 lost")).trouble == "is still being loaded"
    asking.host.answer_s = 15.0
    assert (await asking.ask("rank 3 lost")).decision is not None
    assert asking.host.pids() == first


async def test_a_process_that_cannot_be_started_is_an_answer_too(
    asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking.host.close()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert "cannot be started" in (await asking.ask("rank 3 lost")).trouble
    monkeypatch.undo()
    monkeypatch.chdir(ROOT)
    assert (await asking.ask("rank 3 lost")).decision is not None


async def test_one_that_loops_is_ended_when_its_time_is_over(asking: Asking) -> None:
    await asking.ask("it is loaded now")
    asking.host.answer_s = 0.1
    assert (await asking.ask("loops")).trouble == "gave no answer within 0.1 s"
    asking.host.answer_s = 15.0
    assert (await asking.ask("rank 3 lost")).decision is not None


@pytest.mark.parametrize("told_before", [False, True])
async def test_a_question_is_put_to_the_function_that_it_names(told_before: bool, asking: Asking) -> None:
    await asking.ask("rank 3 lost")
    asking.function = "tests.coordinator.scripted_policies:other"
    if told_before:
        asking.host.use(asking.function)
    answered = await asking.ask("rank 3 lost")
    assert answered.decision is not None
    assert answered.decision.reason == "the other one"


@contextlib.contextmanager
def ended(pid: int) -> Iterator[asyncio.Future[None]]:
    """The end of a process, of whomever it is a child."""
    loop = asyncio.get_running_loop()
    pidfd, future = os.pidfd_open(pid), loop.create_future()

    def readable() -> None:
        if not future.done():
            future.set_result(None)

    loop.add_reader(pidfd, readable)
    try:
        yield future
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


@pytest.mark.parametrize(
    ("function", "because"),
    [
        ("tests.coordinator.scripted_policies:chose", "AttributeError"),
        ("tests.coordinator.nowhere:choose", "ModuleNotFoundError"),
        ("tests.coordinator.scripted_policies:not_a_function", "is a int, not a function"),
        ("tests.coordinator.scripted_policies:ch\0ose", "cannot be loaded: embedded null byte"),
        (f"tests.coordinator.scripted_policies:{'o' * 200_000}", "cannot be loaded: .*Argument list too long"),
        (CHOOSE, ""),
    ],
)
def test_a_function_is_loaded_before_anything_is_started(
    function: str, because: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    if because:
        with pytest.raises(UsageError, match=because):
            check(function)
    else:
        check(function)


@pytest.mark.parametrize(
    ("code", "because"),
    [
        ("import os; os._exit(0)", "ends the process in which it is loaded"),
        (
            "import os, signal\nif pid := os.fork(): open('pid', 'w').write(str(pid)); os._exit(0)\nsignal.pause()",
            "ends the process in which it is loaded",
        ),
        (
            "import subprocess; open('pid', 'w').write(str(subprocess.Popen(['sleep', '1000']).pid)); 1 / 0",
            "ZeroDivisionError",
        ),
    ],
)
def test_a_module_that_breaks_or_leaves_a_process_is_refused_and_nothing_is_left_of_it(
    code: str, because: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "hostile_policy.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with pytest.raises(UsageError, match=because):
        check("hostile_policy:choose")
    if (tmp_path / "pid").exists():
        with contextlib.suppress(ProcessLookupError):  # it is gone already
            pidfd = os.pidfd_open(int((tmp_path / "pid").read_text()))
            try:
                assert select.select([pidfd], [], [], 20.0)[0], "it lives on"
            finally:
                os.close(pidfd)
