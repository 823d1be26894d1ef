"""A rack is asked of a provider, waited for or trained without, and used: by order, by a function, by operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pytest

from rackrun.core.policy.choice import parse_rules
from rackrun.protocol.commands import (
    AskPolicy,
    Command,
    Decided,
    FenceWorker,
    PauseWorkers,
    ReleaseRack,
    RequestRack,
    ResumeGeneration,
    StartWorker,
)
from rackrun.protocol.events import GrowRequested, PolicyAnswered, ShrinkRequested
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.policy_types import Decision, Rung
from tests.core.core_harness import CoreHarness, every, only, plan_in, ranks
from tests.core.resize.job_with_provider import begun, deliver, is_over, lose, reason, rung, said, serve


def test_all_stand_still_until_the_rack_has_come_and_its_workers_take_the_lost_ranks_over() -> None:
    harness = begun()
    asked = lose(harness)
    assert rung(asked) is Rung.ACQUIRE
    request = only(RequestRack, asked)
    assert (request.request, request.trays, request.slots) == (1, 1, 2)
    assert not every(ResumeGeneration, asked)
    assert not said(deliver(harness, 1, "r")), "it is there when its trays have joined"
    joined = harness.join("r", 2)
    assert {start.slot for start in every(StartWorker, joined)} == {"r/0", "r/1"}
    harness.ready("r/0")
    done = harness.ready("r/1")
    assert rung(done) is Rung.SWAP
    assert ranks(plan_in(done)) == {0: "a/0", 1: "a/1", 2: "r/0", 3: "r/1"}
    harness.resume_all()
    assert harness.view.phase == "training"
    assert not every(ReleaseRack, harness.answers), "it is needed"


def test_the_name_of_a_tray_may_be_told_after_it_has_joined() -> None:
    harness = begun()
    lose(harness)
    assert len(every(StartWorker, harness.join("r", 2))) == 2
    assert "rack 1 is there: r, 2 slots" in said(deliver(harness, 1, "r"))


def test_the_others_train_on_meanwhile_and_the_world_grows_when_the_rack_has_come() -> None:
    harness = begun("swap,acquire-train")
    commands = lose(harness)
    assert rung(commands) is Rung.ACQUIRE
    assert only(RequestRack, commands).trays == 1
    assert plan_in(commands).world_size == 2
    harness.resume_all()
    deliver(harness, 1, "r")
    assert len(every(StartWorker, harness.join("r", 2))) == 2
    harness.ready("r/0")
    harness.ready("r/1")
    assert every(PauseWorkers, harness.answers)
    harness.pause_all()
    grown = harness.park_all()
    assert plan_in(grown).world_size == 4
    assert {"r/0", "r/1"} <= set(ranks(plan_in(grown)).values())


def test_a_second_loss_while_a_rack_is_waited_for_asks_for_no_second_one() -> None:
    harness = begun()
    lose(harness)
    harness.exits("a/1")
    harness.timer("gather")
    assert len(every(RequestRack, harness.answers)) == 1


def test_a_rack_of_which_some_trays_never_join_is_used_as_far_as_it_goes() -> None:
    harness = begun()
    lose(harness)
    deliver(harness, 1, "r", "never")
    harness.join("r", 2)
    assert "of rack 1 1 of 2 trays have joined" in said(is_over(harness, "delivered"))
    harness.ready("r/0")
    assert rung(harness.ready("r/1")) is Rung.SWAP


def test_a_rack_that_is_too_small_is_used_after_the_next_rung() -> None:
    harness = begun()
    lose(harness)
    deliver(harness, 1, "r")
    commands = harness.join("r", 1)
    assert rung(commands) is Rung.SHRINK
    assert "acquire: with the rack that came 1 of 2 workers that are missing can come" in reason(commands)
    harness.resume_all()
    assert not every(ReleaseRack, harness.answers)
    harness.ready("r/0")
    harness.pause_all()
    assert plan_in(harness.park_all()).world_size == 3


def test_how_long_a_rack_takes_is_learnt_from_the_first_one() -> None:
    harness = begun()
    lose(harness)
    harness.now += 4_000
    serve(harness)
    harness.tray_lost("r")
    commands = harness.park_all()
    assert only(Decided, commands).decision.figures["request_s"] == 4.0


def test_one_that_comes_as_it_lied_teaches_nothing() -> None:
    harness = begun()
    lose(harness)
    deliver(harness, 1, "r")
    is_over(harness, "delivered")
    harness.resume_all()
    harness.exits("a/1")
    assert only(Decided, harness.park_all()).decision.figures["request_s"] == 600.0


def answered(harness: CoreHarness, decision: Decision) -> Sequence[Command]:
    question = every(AskPolicy, harness.answers)[-1].question
    return harness.tell(PolicyAnswered(question=question, decision=decision))


def with_a_function(provider: str = "local", resizes: str = "in place") -> CoreHarness:
    config = JobConfig(
        trays_min=2, trays_max=2, spares=0, min_ranks=1, provider=provider, policy_function="mine:choose"
    )
    harness = CoreHarness(config)
    harness.resizes = resizes
    harness.join("a", 2)
    harness.join("b", 2)
    harness.train()
    return harness


def test_a_function_may_limit_how_long_all_stand_still_and_is_asked_again_then() -> None:
    harness = with_a_function()
    provider = only(AskPolicy, lose(harness)).view.provider
    assert provider is not None
    assert (provider.asked_s, provider.came, provider.patience_s) == (None, False, 3600.0)
    wanted = Decision(rung=Rung.ACQUIRE, meanwhile="wait", deadline_s=20.0)
    commands = answered(harness, wanted)
    assert only(Decided, commands).decision.deadline_s == 20.0
    only(RequestRack, commands)
    harness.now += 20_000
    provider = only(AskPolicy, harness.timer("repair")).view.provider
    assert provider is not None
    assert provider.asked_s == 20.0
    commands = answered(harness, Decision(rung=Rung.ACQUIRE, meanwhile="train"))
    assert plan_in(commands).world_size == 2
    assert not every(RequestRack, commands), "one is out"


@pytest.mark.parametrize(
    ("provider", "meanwhile", "why"),
    [
        ("", "wait", "acquire is impossible: there is no provider (--provider)"),
        ("local", "train", "acquire is impossible: it is fixed"),
    ],
)
def test_a_function_that_asks_for_what_cannot_be_is_told_why_and_the_default_decides(
    provider: str, meanwhile: Literal["wait", "train"], why: str
) -> None:
    harness = with_a_function(provider, resizes="")
    lose(harness)
    commands = answered(harness, Decision(rung=Rung.ACQUIRE, meanwhile=meanwhile))
    assert f"the policy mine:choose asks for what cannot be: {why}; the default decides" in said(commands)
    assert only(Decided, commands).decision.by == "default"


def one_slot_each(trays: str, rules: str = "swap,acquire-wait,shrink") -> CoreHarness:
    config = JobConfig(
        trays_min=len(trays), trays_max=len(trays), spares=0, min_ranks=1, provider="local", rules=parse_rules(rules)
    )
    harness = CoreHarness(config)
    harness.resizes = "in place"
    for tray in trays:
        harness.join(tray, 1)
    harness.train()
    return harness


def shrink(harness: CoreHarness, to: int) -> Sequence[Command]:
    out = list(harness.tell(ShrinkRequested(request=f"to {to}", to=to, steps=9)))
    if every(PauseWorkers, out):
        out += harness.pause_all()
        out += harness.park_all()
        for slot in [fenced.slot for fenced in every(FenceWorker, out)]:
            harness.exits(slot)
        out += harness.resume_all()
    return out


def test_no_more_racks_are_asked_for_than_a_person_wants_ranks() -> None:
    harness = one_slot_each("abcd")
    shrink(harness, to=2)
    for tray in "dc":
        harness.tray_lost(tray)
    assert only(RequestRack, lose(harness)).trays == 1, "two ranks are wanted, and one lives"


def test_a_rack_that_comes_to_a_world_that_is_to_stay_small_is_not_waited_for() -> None:
    harness = begun("acquire-train,shrink")
    assert every(RequestRack, lose(harness))
    harness.resume_all()
    assert harness.view.world_size == 2
    assert only(ReleaseRack, shrink(harness, to=2)).request == 1
    assert not every(RequestRack, harness.tell(GrowRequested(request="back", to=0))), "only the next failure asks again"
