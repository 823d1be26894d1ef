"""A rack that is refused, fails or is of no use is not waited for; what a provider says is not believed unchecked."""

from __future__ import annotations

import pytest

from rackrun.protocol.commands import Answer, Decided, DismissTray, ReleaseRack, RequestRack, StartWorker
from rackrun.protocol.gpu_health import Health
from rackrun.protocol.policy_types import Rung
from tests.core.core_harness import every, only, stop_in
from tests.core.resize.job_with_provider import begun, deliver, is_over, lose, reason, refuse, rung, said, serve


def test_without_a_provider_acquire_is_refused_with_the_reason() -> None:
    commands = lose(begun(provider=""))
    assert rung(commands) is Rung.SHRINK
    assert "acquire: there is no provider (--provider)" in reason(commands)


def test_after_a_refusal_the_next_rung_is_taken_and_the_reason_said_but_another_failure_asks_again() -> None:
    harness = begun()
    lose(harness)
    commands = refuse(harness)
    assert rung(commands) is Rung.SHRINK
    assert "acquire: rack 1: the provider refused it: no quota" in reason(commands)
    assert not every(ReleaseRack, commands), "there is nothing to take back"
    harness.resume_all()
    harness.exits("a/1")
    assert only(RequestRack, harness.park_all()).request == 2


def test_one_that_hangs_is_waited_for_until_the_deadline_and_the_request_is_taken_back() -> None:
    harness = begun()
    lose(harness)
    commands = is_over(harness, "asked")
    assert only(ReleaseRack, commands).request == 1
    assert rung(commands) is Rung.SHRINK
    assert "acquire: rack 1: it did not come within 60 s (--acquire-timeout)" in reason(commands)


def test_one_that_fails_is_told_to_take_back_what_there_may_be() -> None:
    harness = begun()
    lose(harness)
    commands = refuse(harness, because="OSError: no such queue", failed=True)
    assert only(ReleaseRack, commands).request == 1
    assert "the provider failed: OSError: no such queue" in reason(commands)


def test_with_no_other_rung_the_job_ends_with_the_reason_when_the_provider_has_failed() -> None:
    harness = begun("swap,acquire-wait")
    lose(harness)
    stop = stop_in(refuse(harness))
    assert stop.exit_code == 3
    assert "acquire: rack 1: the provider refused it: no quota" in stop.because


def test_a_rack_that_is_said_to_be_there_and_never_joins_is_not_waited_for_without_end() -> None:
    harness = begun()
    lose(harness)
    deliver(harness, 1, "r")
    commands = is_over(harness, "delivered")
    assert only(ReleaseRack, commands).request == 1
    assert "rack 1: it was delivered, and none of its trays joined within 120 s" in reason(commands)


@pytest.mark.parametrize("trays", [("a",), ("r", "a"), ()])
def test_a_rack_of_trays_that_are_in_the_job_already_is_none(trays: tuple[str, ...]) -> None:
    harness = begun()
    lose(harness)
    commands = deliver(harness, 1, *trays)
    assert rung(commands) is Rung.SHRINK
    assert "the provider says that it is" in reason(commands)
    assert not every(Answer, commands), "the job's own trays stay"


def test_the_same_rack_for_two_requests_is_none() -> None:
    harness = begun()
    lose(harness)
    serve(harness)
    harness.tray_lost("a")
    harness.park_all()
    commands = deliver(harness, 2, "r")
    assert "the provider says that it is r, in the job before" in said(commands)


def test_a_rack_that_is_delivered_twice_is_the_same_rack() -> None:
    harness = begun()
    lose(harness)
    deliver(harness, 1, "r")
    harness.join("r", 2)
    assert "once more" in said(deliver(harness, 1, "r", "s"))
    harness.ready("r/0")
    assert rung(harness.ready("r/1")) is Rung.SWAP


def test_a_rack_that_comes_after_it_was_cancelled_is_sent_back_and_not_used() -> None:
    harness = begun()
    lose(harness)
    is_over(harness, "asked")
    harness.resume_all()
    late = deliver(harness, 1, "r")
    assert only(ReleaseRack, late).because == "it comes too late"
    commands = harness.join("r", 2)
    assert not every(StartWorker, commands)
    assert only(DismissTray, commands).tray == "r"


@pytest.mark.parametrize("request_", [1, 5])
def test_a_late_or_made_up_delivery_that_names_trays_of_the_job_sends_none_of_them_away(request_: int) -> None:
    harness = begun()
    lose(harness)
    is_over(harness, "asked")
    harness.resume_all()
    commands = deliver(harness, request_, "a")
    assert "nobody wants it" in said(commands)
    assert not every(Answer, commands)
    assert not [tray for tray in harness.view.trays if tray.withdrawn]


def test_workers_that_never_become_ready_are_not_waited_for_without_end() -> None:
    harness = begun()
    lose(harness)
    deliver(harness, 1, "r")
    harness.join("r", 2)
    commands = is_over(harness, "joined")
    assert only(ReleaseRack, commands).request == 1
    assert rung(commands) is Rung.SHRINK
    assert "none of its workers was ready within 600 s" in reason(commands)


def test_a_rack_whose_workers_all_fail_is_given_back() -> None:
    harness = begun()
    lose(harness)
    deliver(harness, 1, "r")
    harness.join("r", 2)
    for slot in ("r/0", "r/1") * 3:
        commands = harness.exits(slot, code=1)
    assert "rack 1 came to nothing: it is of no use: its workers fail (r/1: exit code 1)" in said(commands)
    assert only(ReleaseRack, commands).request == 1
    assert "shrink" in {one.decision.rung.value for one in every(Decided, harness.answers)}


def test_after_three_requests_in_a_row_of_which_nothing_came_there_is_no_fourth() -> None:
    harness = begun("swap,acquire-wait,shrink")
    for number in (1, 2, 3):
        assert only(RequestRack, lose(harness, passed=10 * number)).request == number
        refuse(harness, number)
        harness.resume_all()
        harness.join("b", 2)
        harness.ready("b/0")
        harness.ready("b/1")
        harness.pause_all()
        harness.park_all(10 * number)
        harness.resume_all()
        assert harness.view.world_size == 4
    commands = lose(harness, passed=40)
    assert rung(commands) is Rung.SHRINK
    why = "acquire: 3 requests in a row came to nothing (the last: rack 3: the provider refused it: no quota)"
    assert why in reason(commands)


def test_racks_that_are_lost_before_they_were_of_use_are_not_asked_for_again_and_again() -> None:
    harness = begun()
    lose(harness)
    deliver(harness, 1, "r")
    harness.join("r", 2)
    harness.ready("r/0")
    commands = harness.tray_lost("r")
    assert rung(commands) is Rung.SHRINK
    assert "acquire: rack 1: it was lost before it was of use" in reason(commands)
    assert len(every(RequestRack, harness.answers)) == 1


def test_racks_that_served_and_then_broke_are_counted_in_a_row_too() -> None:
    harness = begun("swap,acquire-wait,shrink")
    for number, tray in enumerate("rst", start=1):
        lose(harness, passed=10 * number)
        serve(harness, tray, number)
        for slot in (f"{tray}/0", f"{tray}/1"):
            harness.judges(slot, Health.LOST)
        for slot in (f"{tray}/0", f"{tray}/1"):
            harness.exits(slot)
        commands = harness.park_all(10 * number)
        assert f"rack {number} came to nothing: it is of no use: none of its slots can be used" in said(harness.answers)
        assert rung(commands) is Rung.SHRINK
        harness.resume_all()
        harness.join("b", 2)
        harness.ready("b/0")
        harness.ready("b/1")
        harness.pause_all()
        harness.park_all(10 * number)
        harness.resume_all()
    assert "acquire: 3 requests in a row came to nothing" in reason(lose(harness, passed=40))
