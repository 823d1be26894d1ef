"""A rack is released when nobody needs it any more, and left when its provider takes it back."""

from __future__ import annotations

import pytest

from rackrun.protocol.commands import Answer, DismissTray, PauseWorkers, ReleaseRack, RequestRack, StartWorker
from rackrun.protocol.events import PolicyRequested, RackPreempted
from rackrun.protocol.ids import TrayId
from tests.core.core_harness import every, only, plan_in, ranks
from tests.core.resize.job_with_provider import begun, deliver, lose, said, serve


def test_a_request_is_cancelled_when_the_lost_ranks_have_come_back_otherwise() -> None:
    harness = begun()
    lose(harness)
    harness.join("b", 2)
    harness.ready("b/0")
    harness.ready("b/1")
    commands = harness.resume_all()
    assert only(ReleaseRack, commands).because == "every rank has a worker"
    assert not [tray for tray in harness.view.trays if tray.withdrawn]


def test_a_rack_is_given_back_when_the_jobs_own_trays_suffice_again() -> None:
    """First spares start there, then ranks go over between two steps, then its trays are dismissed, then it is released."""
    harness = begun()
    lose(harness)
    serve(harness)
    back = harness.join("b", 2)
    assert {start.slot for start in every(StartWorker, back)} == {"b/0", "b/1"}
    harness.ready("b/0")
    commands = harness.ready("b/1")
    assert "rack 1 is given back" in said(commands)
    assert every(PauseWorkers, commands)
    harness.pause_all()
    plan = plan_in(harness.park_all())
    assert ranks(plan) == {0: "a/0", 1: "a/1", 2: "b/0", 3: "b/1"}
    harness.resume_all()
    for slot in ("r/0", "r/1"):
        harness.exits(slot)
    assert only(DismissTray, harness.answers).tray == "r"
    assert only(ReleaseRack, harness.tray_lost("r")).because == "its trays are gone"


def test_a_rack_that_is_lost_is_released_and_another_one_is_asked_for() -> None:
    harness = begun()
    lose(harness)
    serve(harness)
    assert only(ReleaseRack, harness.tray_lost("r")).request == 1
    assert only(RequestRack, harness.park_all()).request == 2


def test_on_notice_of_preemption_ranks_leave_what_it_names() -> None:
    harness = begun("swap,acquire-wait", spares=2)
    lose(harness, "b")
    harness.resume_all()  # the spares on c have taken over
    lose(harness, "c")
    serve(harness)
    harness.join("b", 2)
    harness.ready("b/0")
    harness.ready("b/1")
    commands = harness.tell(RackPreempted(request=1, because="the queue needs it"))
    assert every(PauseWorkers, commands)
    harness.pause_all()
    assert {"b/0", "b/1"} <= set(ranks(plan_in(harness.park_all())).values())


def test_on_notice_for_a_part_of_a_rack_spares_start_on_the_rest_and_ranks_go_there() -> None:
    harness = begun()
    lose(harness)
    deliver(harness, 1, "r", "s")
    for tray in ("r", "s"):
        harness.join(tray, 2)
    for slot in ("r/0", "r/1"):
        harness.ready(slot)
    harness.resume_all()
    harness.timer("calm")
    commands = harness.tell(RackPreempted(request=1, because="the queue needs it", trays=(TrayId("r"),)))
    assert {start.slot for start in every(StartWorker, commands)} == {"s/0", "s/1"}
    harness.ready("s/0")
    assert every(PauseWorkers, harness.ready("s/1"))
    harness.pause_all()
    assert ranks(plan_in(harness.park_all())) == {0: "a/0", 1: "a/1", 2: "s/0", 3: "s/1"}
    harness.resume_all()
    for slot in ("r/0", "r/1"):
        harness.exits(slot)
    assert only(DismissTray, harness.answers).tray == "r"
    harness.tray_lost("r")
    assert not every(ReleaseRack, harness.answers), "the rest of it is in use"


@pytest.mark.parametrize(("request_", "trays"), [(1, ("a",)), (7, ("a",)), (7, ())])
def test_a_notice_of_preemption_drains_nothing_that_is_not_of_that_rack(request_: int, trays: tuple[str, ...]) -> None:
    harness = begun()
    lose(harness)
    serve(harness)
    commands = harness.tell(RackPreempted(request=request_, because="mine now", trays=tuple(map(TrayId, trays))))
    assert not every(Answer, commands)
    assert not [tray for tray in harness.view.trays if tray.withdrawn]


def test_a_rack_is_kept_by_a_policy_that_has_come_to_forbid_swaps() -> None:
    harness = begun("swap,acquire-wait")
    lose(harness)
    serve(harness)
    assert harness.view.world_size == 4
    harness.tell(PolicyRequested(request="p", policy="no-swap"))
    started = harness.join("b", 2)
    assert not every(StartWorker, started), "nobody could go over to them"
    assert not every(ReleaseRack, harness.answers)
