"""A slot that loses one worker after another is left out, and tried again: with time, and when it has shown that it is in order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rackrun.core.members.quarantine import HEALTHY_MS, PAUSE_MS, PAUSE_MS_MAX, Quarantine
from rackrun.protocol.commands import Command, Notice, SetTimer, StartWorker, StopJob
from rackrun.protocol.events import TimerFired
from rackrun.protocol.ids import SlotId
from rackrun.protocol.job_config import JobConfig
from tests.core.core_harness import CoreHarness, every, only, plan_in, ranks

SLOT = SlotId("a/2")


def lost(training: CoreHarness, times: int, slot: str = "a/2") -> list[SetTimer]:
    return [timer for _ in range(times) for timer in every(SetTimer, training.exits(slot, code=1))]


def test_a_slot_that_is_left_out_is_tried_again(training: CoreHarness) -> None:
    timer = next(timer for timer in lost(training, 3) if str(timer.timer) == f"quarantine:{SLOT}")
    assert timer.at_ms == training.now + PAUSE_MS
    assert training.view.trays[0].quarantined == (SLOT,)
    training.now = timer.at_ms
    assert only(StartWorker, training.tell(TimerFired(timer=timer.timer))).slot == SLOT
    assert not training.view.trays[0].quarantined


def test_each_further_loss_doubles_the_pause_up_to_an_hour(training: CoreHarness) -> None:
    lost(training, 2)
    for number in range(9):
        timer = next(timer for timer in lost(training, 1) if str(timer.timer) == f"quarantine:{SLOT}")
        assert timer.at_ms - training.now == min(PAUSE_MS << number, PAUSE_MS_MAX)
        training.now = timer.at_ms
        training.tell(TimerFired(timer=timer.timer))


def test_a_timer_of_a_former_pause_lifts_nothing() -> None:
    quarantine = Quarantine()
    for _ in range(3):
        quarantine.blame(SLOT, 0)
    assert quarantine.take_new() == [(SLOT, PAUSE_MS)]
    quarantine.blame(SLOT, 10)
    assert not quarantine.lift(SLOT, PAUSE_MS)
    assert quarantine.lift(SLOT, 10 + 2 * PAUSE_MS)
    assert not quarantine.lift(SLOT, 10 + 2 * PAUSE_MS)


def test_a_pause_is_told_once_and_one_that_was_forgiven_before_it_was_told_never() -> None:
    quarantine = Quarantine()
    for slot in (SLOT, SlotId("a/3")):
        for _ in range(3):
            quarantine.blame(slot, 0)
    quarantine.forgive(SLOT)
    assert quarantine.take_new() == [(SlotId("a/3"), PAUSE_MS)]
    assert quarantine.take_new() == []


def test_the_timer_of_a_pause_is_set_once_however_much_happens_in_it(training: CoreHarness) -> None:
    lost(training, 3)
    later = [timer for timer in lost(training, 1, "a/1") if str(timer.timer) == f"quarantine:{SLOT}"]
    assert later == []


@pytest.mark.parametrize("healthy", [False, True])
def test_who_trains_long_shows_that_the_slot_is_in_order(healthy: bool) -> None:
    quarantine = Quarantine()
    quarantine.blame(SLOT, 0)
    quarantine.blame(SLOT, 0)
    quarantine.left(SLOT)
    quarantine.trains([SLOT], 1000)
    quarantine.trains([SLOT], 5000)  # in another generation: it goes on
    quarantine.blame(SLOT, 1000 + HEALTHY_MS - (not healthy))
    assert quarantine.faults == {SLOT: 1 if healthy else 3}
    assert (SLOT in quarantine.until_ms) != healthy


def test_a_spare_that_only_waits_shows_nothing(training: CoreHarness) -> None:
    lost(training, 2)
    training.now += 10 * HEALTHY_MS
    lost(training, 1)
    assert training.view.trays[0].quarantined == (SLOT,)


def test_a_job_whose_healthy_slots_have_all_lost_workers_waits_for_them_and_goes_on() -> None:
    """All of one storm: at the end no slot is free, though every GPU is in order."""
    harness = CoreHarness(JobConfig(trays_min=1, trays_max=1, spares=1))
    harness.join("a", 3)
    harness.train()
    timers = lost(harness, 3)
    commands: Sequence[Command] = [*harness.exits("a/1", code=1), *harness.park_all()]
    timers += every(SetTimer, commands)
    for _ in range(2):  # who is started for it fails too
        assert only(StartWorker, commands).slot == "a/1"
        commands = harness.exits("a/1", code=1)
        timers += every(SetTimer, commands)
    assert harness.view.trays[0].quarantined == ("a/1", "a/2")
    assert not every(StopJob, [*commands, *harness.timer("repair")])
    assert "a/2 (it has lost 3 workers, and is tried again in 30 s)" in only(Notice, commands).text
    lifts = next(timer for timer in timers if str(timer.timer) == "quarantine:a/2")
    harness.now = lifts.at_ms
    assert only(StartWorker, harness.tell(TimerFired(timer=lifts.timer))).slot == "a/2"
    assert ranks(plan_in(harness.ready("a/2"))) == {0: "a/0", 1: "a/2"}
