"""People and schedulers ask things of a job that trains: a tray is drained and returned, a rank is swapped, an agent is told to leave.
It is the same training, and no step is done again."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable

import pytest

from rackrun.protocol.commands import Answer
from tests.faults.scripts.strike import Fault
from tests.faults.trained import RANKS, Trained

pytestmark = pytest.mark.slow

Train = Callable[..., Trained]
Reference = Callable[[str], Trained]
TRAYS, SPARES = 3, 2


def hold(step: int, until: str, but: int | None = None) -> list[Fault]:
    """Between two steps nobody waits for anybody: it may take as long as it takes."""
    return [
        Fault(name=f"{until}, rank {rank}", place="between steps", rank=rank, step=step, then="wait", until=until)
        for rank in range(RANKS)
        if rank != but
    ]


def ask(step: int, by: int, until: str, **fields: str | int) -> list[Fault]:
    """Rank ``by`` asks, and all wait until the coordinator has said or done something."""
    asks = Fault(
        name=f"{fields['what']}", place="between steps", rank=by, step=step, then="ASK", ask=fields, until=until
    )
    return [asks, *hold(step, until, but=by)]


@pytest.mark.stories
@pytest.mark.parametrize("mode", ["ddp", pytest.param("fsdp", marks=pytest.mark.soak)])
def test_a_tray_is_drained_and_returned_and_a_rank_goes_there_again(
    mode: str, train: Train, reference: Reference
) -> None:
    """Ranks 0 and 1 are on the first tray, two spares on the last one."""
    faults = [
        *ask(3, 1, "command PauseWorkers 1", what="drain", target="TRAY", because="its fan"),
        *hold(6, "answer done 1"),
        *ask(7, 0, "answer done 2", what="return", target="tray-00"),
        *ask(8, 3, "command PauseWorkers 2", what="swap", rank=2, to="tray-00/1"),
        *hold(11, "answer done 3"),
    ]
    trained = train(mode, faults, spares=SPARES, trays=TRAYS)
    assert_nothing_again(trained, reference(mode), faults)
    first, second = trained.recoveries
    assert {(one["rank"], one["slot"], one["to"].partition("/")[0]) for one in first["lost"]} == {
        (0, "tray-00/0", "tray-02"),
        (1, "tray-00/1", "tray-02"),
    }
    assert [(one["rank"], one["to"]) for one in second["lost"]] == [(2, "tray-00/1")]
    assert [one.text for one in answers(trained) if one.outcome == "done"] == [
        "tray-00 is empty",
        "tray-00 may be used again",
        "rank 2 went from tray-01/0 to tray-00/1",
    ]


@pytest.mark.stories
@pytest.mark.parametrize("mode", [pytest.param("ddp", marks=pytest.mark.soak), "fsdp"])
def test_an_agent_that_is_told_to_leave_goes_when_its_ranks_are_elsewhere(
    mode: str, train: Train, reference: Reference
) -> None:
    faults = [
        Fault(name="notice", place="backward", rank=2, step=3, then="LEAVE"),
        *hold(4, "command PauseWorkers 1"),
        *hold(8, "event TrayLost 1"),
    ]
    trained = train(mode, faults, spares=SPARES, trays=TRAYS)
    assert_nothing_again(trained, reference(mode), faults)
    (recovery,) = trained.recoveries
    assert sorted(one["rank"] for one in recovery["lost"]) == [2, 3]
    assert [one.text for one in answers(trained)] == [
        "tray-01 is told to leave (SIGTERM to the agent of tray-01)",
        "tray-01 is empty",
    ]


def assert_nothing_again(trained: Trained, reference: Trained, faults: list[Fault]) -> None:
    trained.assert_same_training(reference, faults)
    assert all(recovery["planned"] for recovery in trained.recoveries), trained
    assert {(one["rollback"], tuple(one["redone"])) for one in trained.recoveries} == {(None, ())}, trained
    with contextlib.closing(sqlite3.connect(trained.ran.out_dir / "journal.sqlite")) as journal:
        assert journal.execute("SELECT DISTINCT attempt FROM units").fetchall() == [(0,)], trained


def answers(trained: Trained) -> list[Answer]:
    with contextlib.closing(sqlite3.connect(trained.ran.out_dir / "journal.sqlite")) as journal:
        rows = journal.execute("SELECT body FROM events WHERE name = 'Answer' ORDER BY id").fetchall()
    return [
        Answer(**{name: value for name, value in json.loads(body).items() if name != "command"}) for (body,) in rows
    ]
