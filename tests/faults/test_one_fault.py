"""A rank is lost, at any place of a step, of a phase, or of the end: it is the same training, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults.scripts.strike import IN_COLLECTIVE, IN_GATE, Fault
from tests.faults.trained import RANKS, Trained

pytestmark = pytest.mark.slow

MODES = ("ddp", "fsdp")


def kill(rank: int, place: str, step: int | None = None) -> tuple[Fault, ...]:
    return (Fault(name="lost", place=place, rank=rank, step=step),)


def kill_waiting(rank: int, place: str, step: int, peer: int, peer_place: str) -> tuple[Fault, ...]:
    """``rank`` dies in a collective that ``peer`` has not entered yet, so all others wait in it too."""
    hold = Fault(name="held back", place=peer_place, rank=peer, step=step, then="wait", until="lost")
    return (*kill(rank, place, step), hold)


def unseen_by(ranks: tuple[int, ...], step: int) -> tuple[Fault, ...]:
    """These get the gate's result, but the world breaks before they have noticed."""
    return tuple(
        Fault(name=f"slow {rank}", place="gate reduced", rank=rank, step=step, then="sleep", delay_ms=500)
        for rank in ranks
    )


AT_ANY_PLACE = {
    "in forward": kill(1, "forward", 5),
    "in backward": kill(2, "backward", 6),
    "waiting in a collective": kill_waiting(3, IN_COLLECTIVE, 5, 0, "entering a collective"),
    "before the gate": kill(0, "before the gate", 5),
    "in the gate, not entered": kill(1, "gate entered", 6),
    "in the gate, waiting": kill_waiting(2, IN_GATE, 7, 1, "gate entered"),
    "in the gate, which one survivor has not seen pass": (*kill(2, "gate reduced", 5), *unseen_by((0,), 5)),
    "in the gate, which only it has seen pass": (*kill(3, "before the update", 6), *unseen_by((0, 1, 2), 6)),
    "in the gate, which one survivor has not entered": (
        *kill(1, "gate entered", 5),
        Fault(name="late", place="before the gate", rank=3, step=5, then="wait", until="lost"),
    ),
    "before the update": kill(3, "before the update", 5),
    "after the update": kill(0, "after the update", 6),
    "at the end of the step": kill(1, "end of the step", 7),
    "before it has told of its commit": kill(2, "before units.UnitRunner._report_commit", 5),
    "after it has told of its commit": kill(3, "after units.UnitRunner._committed", 6),
    "between steps": kill(0, "between steps", 6),
    "in an evaluation": kill(1, "evaluation", 7),
    "at the end of an evaluation": kill(2, "evaluation reduced", 7),
    "in the last step": kill(3, "backward", 13),
    "after the last update": kill(0, "after the update", 13),
    "in the phase at the end": kill(1, "at the end"),
    "at the end of the phase at the end": kill(0, "exported"),
    "after the loop": kill(2, "after the loop"),
    "waiting for the others to finish": kill(3, "before world.World.wait_released"),
}

AT_THE_START = {
    "in the first forward": kill(1, "forward", 0),
    "before the first gate": kill(2, "before the gate", 0),
    "after the first update": kill(3, "after the update", 0),
    "between the first and the second step": kill(0, "between steps", 0),
    "in the second step": kill(1, "backward", 1),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("faults", AT_ANY_PLACE.values(), ids=AT_ANY_PLACE)
def test_a_spare_takes_over(
    mode: str, faults: tuple[Fault, ...], train: Callable[..., Trained], reference: Callable[[str], Trained]
) -> None:
    trained = train(mode, faults)
    trained.assert_same_training(reference(mode), faults)
    (recovery,) = trained.recoveries
    assert recovery["kind"] == "swap", trained
    assert [lost["how"] for lost in recovery["lost"]] == ["SIGKILL"], trained
    assert (recovery["rollback"] is None) == (mode == "ddp"), trained


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("faults", AT_THE_START.values(), ids=AT_THE_START)
def test_there_may_be_no_copy_yet(
    mode: str, faults: tuple[Fault, ...], train: Callable[..., Trained], reference: Callable[[str], Trained]
) -> None:
    """Under FSDP2 shards have no replica, and before the first snapshot no copy: only a new start gives them."""
    trained = train(mode, faults)
    trained.assert_same_training(reference(mode), faults)
    assert len(trained.recoveries) == 1, trained
    if mode == "ddp":
        assert trained.recoveries[0]["kind"] == "swap", trained


def test_a_stopped_rank_is_noticed_in_time_and_replaced(
    train: Callable[..., Trained], reference: Callable[[str], Trained]
) -> None:
    """Within three times the slowest of the observed steps, or a second."""
    faults = (Fault(name="stopped", place="forward", rank=2, step=9, then="STOP"),)
    trained = train("ddp", faults)
    trained.assert_same_training(reference("ddp"), faults)
    (recovery,) = trained.recoveries
    assert [lost["rank"] for lost in recovery["lost"]] == [2], trained
    noticed_s = trained.breaks[-1] - trained.struck["stopped"]["wall"]
    assert noticed_s <= max(3 * trained.slowest_s, 1.0) + 0.3, f"noticed after {noticed_s:.2f} s\n{trained}"


def test_nothing_is_left_when_the_launcher_is_killed(train: Callable[..., Trained]) -> None:
    trained = train("ddp", [Fault(name="launcher", place="backward", rank=1, step=6, then="LAUNCHER")])
    assert trained.ran.exit_code == -9, trained
    assert not trained.ran.left_behind, trained
    assert "launcher" in trained.struck
    assert len(trained.held) < RANKS
