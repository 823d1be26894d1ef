"""Who decides, and what becomes of an answer: the rules, the user's function, and the default behind both."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from rackrun.core.machine.control_plane import ControlPlane
from rackrun.core.policy.choice import parse_rules
from rackrun.core.policy.measured_costs import CostMeter
from rackrun.core.recovery.ask_policy import ANSWER_MS
from rackrun.protocol.commands import (
    Answer,
    AskPolicy,
    BreakGeneration,
    Command,
    Decided,
    FenceWorker,
    Notice,
    PauseWorkers,
    ResumeGeneration,
    SetTimer,
    StartWorker,
    StopJob,
)
from rackrun.protocol.events import (
    CostsMeasured,
    DepartureAnnounced,
    DrainRequested,
    Event,
    PolicyAnswered,
    PolicyRequested,
    TimerFired,
    TrayJoined,
    TrayLost,
)
from rackrun.protocol.gpu_health import Health
from rackrun.protocol.ids import Step, TrayId
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.policy_types import Decision, FailureCause, Rung
from tests.core.core_harness import CoreHarness, every, only, plan_in, stop_in
from tests.core.core_model import Cluster, Process
from tests.core.machine.test_storms import KINDS, play


def job(policy: str = "", **options: Any) -> CoreHarness:
    """As the fixture ``training``; ``policy`` is a list of rungs, or the name of a function."""
    given: dict[str, Any] = {"policy_function": policy} if ":" in policy else {"rules": parse_rules(policy)}
    harness = CoreHarness(JobConfig(trays_min=2, trays_max=2, spares=2, **given, **options))
    harness.join("a", 3)
    harness.join("b", 3)
    harness.train()
    return harness


def told_to_leave(harness: CoreHarness) -> None:
    harness.tell(DepartureAnnounced(tray=TrayId("a"), because="SIGTERM", exit_code=143))


@pytest.mark.parametrize("happens", [told_to_leave, lambda harness: harness.judges("a/0", Health.LOST)])
def test_no_restart_is_decided_where_too_few_slots_can_be_used_again(happens: Callable[[CoreHarness], object]) -> None:
    harness = CoreHarness(JobConfig(trays_min=1, trays_max=1, spares=0, start_over=True))
    harness.join("a", 2)
    harness.train("unique")
    harness.exits("a/1")
    harness.timer("gather")
    happens(harness)
    answers = harness.exits("a/0")
    assert [one.decision.rung for one in every(Decided, answers)] == [Rung.STOP]
    assert "2 ranks need a slot" in stop_in(answers).because


def test_a_restart_is_decided_where_slots_may_come_back() -> None:
    harness = CoreHarness(JobConfig(trays_min=1, trays_max=1, spares=0, start_over=True))
    harness.join("a", 2)
    harness.train("unique")
    harness.exits("a/1")
    harness.timer("gather")
    harness.checks("a/0", "its memory is bad")
    harness.tell(DrainRequested(request="d", target="a/1", because="", wait=True, steps=5))
    answers = harness.exits("a/0")
    assert [one.decision.rung for one in every(Decided, answers)] == [Rung.RESTART]
    assert harness.view.phase == "restarting"


def question_in(commands: Sequence[Command]) -> AskPolicy:
    return only(AskPolicy, commands)


def answer(
    harness: CoreHarness, rung: Rung | None, *, question: int = 0, trouble: str = "", **fields: Any
) -> Sequence[Command]:
    """To what was asked last, unless it is said."""
    asked = every(AskPolicy, harness.answers)[-1].question
    decision = None if rung is None else Decision(rung=rung, **fields)
    return harness.tell(PolicyAnswered(question=question or asked, decision=decision, trouble=trouble))


# -- by default --------------------------------------------------------------------------------------------------------
def test_a_swap_is_told_of_with_its_figures_before_it_is_made(training: CoreHarness) -> None:
    training.exits("b/1")
    answers = training.park_all()
    decided = only(Decided, answers)
    assert decided.decision.rung is Rung.SWAP
    assert decided.decision.targets == {3: "b/2"}
    assert decided.decision.reason.startswith("swap: 4 x (")
    assert decided.failure.what == "rank 3 lost (SIGKILL)"
    assert decided.failure.evidence == ("rank 3 on b/1: SIGKILL",)
    assert answers.index(decided) < answers.index(only(ResumeGeneration, answers))
    assert not every(AskPolicy, answers)


def test_a_stall_that_nobody_is_to_blame_for_is_absorbed(training: CoreHarness) -> None:
    training.is_severed("a/0")
    decided = only(Decided, training.park_all())
    assert (decided.decision.rung, decided.failure.whose) == (Rung.ABSORB, FailureCause.NETWORK)


def test_a_wait_for_a_spare_is_decided_once_and_then_the_swap(rack: CoreHarness) -> None:
    for slot in rack.members:
        rack.ready(slot, "all")
    rack.exits("a/0")
    waits = only(Decided, rack.park_all()).decision
    assert (waits.rung, waits.deadline_s) == (Rung.WAIT, 600.0)
    assert not every(Decided, rack.exits("b/2"))
    assert only(Decided, rack.ready("a/2")).decision.rung is Rung.SWAP


@pytest.mark.parametrize(
    ("how", "whose"),
    [
        ({"signal": 9}, FailureCause.HARDWARE),
        ({"signal": 15}, FailureCause.PREEMPTION),
        ({"signal": 11}, FailureCause.HARDWARE),
        ({"bug": "train.py:7"}, FailureCause.HARDWARE),
    ],
)
def test_a_first_fault_is_classed_by_how_the_process_ended(
    training: CoreHarness, how: dict[str, Any], whose: FailureCause
) -> None:
    training.exits("b/1", **how)
    assert only(Decided, training.park_all()).failure.whose is whose


def test_a_step_that_failed_in_place_too_often_is_the_scripts_and_nobody_is_asked() -> None:
    harness = job("mine:choose")
    for _ in range(3):
        harness.is_severed("a/0")
        harness.park_all()
        answer(harness, Rung.ABSORB)
        harness.resume_all()
    harness.is_severed("a/0")
    answers = harness.park_all()
    assert not every(AskPolicy, answers)
    assert only(Decided, answers).failure.whose is FailureCause.USER
    assert "done again 3 times" in stop_in(answers).because


# -- rungs in an order -------------------------------------------------------------------------------------------------
def test_a_rung_that_is_not_in_the_order_is_not_taken() -> None:
    harness = job("restart")
    harness.exits("b/1")
    stop = stop_in(harness.park_all())
    assert stop.exit_code == 3
    assert "stop, by the order given" in stop.because
    assert "no checkpoint is on disk" in stop.because
    assert "swap" in stop.remedy


def test_a_restart_may_be_wanted_although_a_spare_is_ready() -> None:
    harness = job("restart,swap", start_over=True)
    harness.exits("b/1")
    answers = harness.park_all()
    assert only(Decided, answers).decision.rung is Rung.RESTART
    assert all(fence.swept_along for fence in every(FenceWorker, answers))
    assert len(every(FenceWorker, answers)) == 5
    assert harness.view.phase == "restarting"


def test_what_is_forbidden_is_not_taken_though_it_is_the_cheapest() -> None:
    harness = job("no-absorb")
    harness.is_severed("a/0")
    assert "nothing else is possible and allowed" in stop_in(harness.park_all()).because


def test_an_order_without_a_restart_does_not_end_in_one_when_no_state_is_left() -> None:
    """Though a restart that is impossible now would be begun by default, to say what is in its way."""
    harness = job("swap", start_over=True)
    harness.tray_lost("b")
    harness.exits("a/0")
    harness.exits("a/1")
    assert "and no copy of its state is left" in stop_in(harness.park_all()).because


@pytest.mark.parametrize("policy", ["no-swap", "stop", "absorb,restart"])
def test_no_rank_is_taken_out_of_a_failing_gpu_where_a_swap_is_not_allowed(policy: str) -> None:
    harness = CoreHarness(JobConfig(trays_min=2, trays_max=2, spares=2, rules=parse_rules(policy)))
    harness.join("a", 3, clique="x")
    harness.join("b", 3, clique="x")
    harness.train()
    assert not every(PauseWorkers, harness.judges("a/0", Health.DEGRADED))


# -- where there is no choice ------------------------------------------------------------------------------------------
def test_a_world_that_lost_somebody_before_the_first_step_begins_again_and_says_so(rack: CoreHarness) -> None:
    rack.elastic("a/0")
    answers = rack.exits("b/1")
    decided = only(Decided, answers)
    assert (decided.decision.rung, decided.decision.by, decided.failure.ranks) == (Rung.RESTART, "rule", (3,))
    assert decided.decision.reason.startswith("restart: nothing would be lost by it (4 x (30 s start + ")
    assert answers.index(decided) < answers.index(every(FenceWorker, answers)[0])


def test_of_a_plain_script_nobody_knows_what_it_computes_again(rack: CoreHarness) -> None:
    decision = only(Decided, rack.exits("b/1")).decision
    assert (decision.reason, decision.figures) == ("restart: a script without steps begins again", {})


def test_nothing_is_decided_where_no_restart_is_left() -> None:
    harness = CoreHarness(JobConfig(trays_min=2, trays_max=2, spares=2, max_restarts=0))
    harness.join("a", 3)
    harness.join("b", 3)
    answers = harness.exits("b/1")
    stop_in(answers)
    assert not every(Decided, answers)


# -- waiting for hardware ----------------------------------------------------------------------------------------------
def test_all_stand_still_until_a_tray_has_come_back_if_the_user_gives_it_time() -> None:
    harness = job(repair_patience_ms=3_600_000)
    harness.tray_lost("b")
    decided = only(Decided, harness.park_all())
    assert (decided.decision.rung, decided.decision.deadline_s) == (Rung.WAIT, 3600.0)
    assert harness.view.phase == "parking"
    harness.now = 61_000
    assert every(StartWorker, harness.join("b", 3))
    for spare in harness.view.spares:
        last = harness.ready(spare.slot)
    assert plan_in(last).world_size == 4


def test_hardware_that_does_not_come_in_time_ends_the_wait() -> None:
    harness = job(repair_patience_ms=3_600_000)
    harness.tray_lost("b")
    harness.park_all()
    harness.now = 600_000
    assert not every(StopJob, harness.timer("recover"))
    harness.now = 3_600_000
    assert "2 ranks to replace, 1 spare, no free slot left" in stop_in(harness.timer("repair")).because


# -- a function of the user's ------------------------------------------------------------------------------------------
def asked() -> CoreHarness:
    """Rank 3 is lost, and the function is asked what to do."""
    harness = job("mine:choose", start_over=True)
    harness.exits("b/1")
    question = question_in(harness.park_all())
    assert question.failure.ranks == (3,)
    assert question.view.takeovers == {3: "b/2"}
    assert harness.view.phase == "parking"
    return harness


def test_the_job_goes_on_when_the_function_has_answered() -> None:
    answers = answer(asked(), Rung.SWAP, reason="spares are\nfor this")
    decision = only(Decided, answers).decision
    assert (decision.by, decision.rung) == ("user", Rung.SWAP)
    assert decision.reason.startswith("swap: spares are for this (4 x (")
    assert plan_in(answers).generation == 2


def test_its_answer_counts_against_what_is_cheapest() -> None:
    harness = asked()
    assert only(Decided, answer(harness, Rung.RESTART)).decision.by == "user"
    assert harness.view.phase == "restarting"


def test_it_may_leave_the_decision_to_the_default() -> None:
    answers = answer(asked(), None)
    assert only(Decided, answers).decision.by == "default"
    assert not every(Notice, answers)
    plan_in(answers)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rung": None, "trouble": "failed with ValueError: no"}, "failed with ValueError: no"),
        ({"rung": Rung.SHRINK}, "asks for what cannot be: shrink is impossible: the number of ranks is fixed"),
        ({"rung": Rung.ABSORB}, "asks for what cannot be: absorb is impossible: a rank is lost"),
        ({"rung": Rung.SWAP, "targets": {3: "a/0"}}, "its targets are not those of the view"),
        ({"rung": Rung.SWAP, "deadline_s": float("nan")}, "a deadline of nan s"),
    ],
)
def test_a_bad_answer_is_said_and_the_default_decides(given: dict[str, Any], said: str) -> None:
    answers = answer(asked(), **given)
    text = only(Notice, answers).text
    assert text.startswith("the policy mine:choose")
    assert said in text
    assert text.endswith("the default decides")
    plan_in(answers)


def test_a_stop_that_it_wants_is_one_though_the_job_could_begin_again() -> None:
    harness = job("mine:choose", start_over=True, max_restarts=1)
    harness.tray_lost("b")
    harness.exits("a/0")
    harness.exits("a/1")
    question = question_in(harness.park_all())
    assert question.view.rollback_steps is None
    stop = stop_in(answer(harness, Rung.STOP, reason="enough"))
    assert "no copy of its state is left" in stop.because
    assert harness.view.restarts == 0


def test_what_it_says_comes_as_one_short_line_without_control_characters() -> None:
    harness = asked()
    notice = only(Notice, answer(harness, None, trouble="failed with X: \x1b[2J\r\nrm -rf\u202e " + "long" * 500))
    assert "\x1b" not in notice.text
    assert "failed with X: [2J rm -rf long" in notice.text
    assert len(notice.text) < 400
    harness = asked()
    assert only(Decided, answer(harness, Rung.SWAP, reason="\x1b[2J" + "x" * 9_999)).decision.reason.startswith(
        "swap: [2Jxxx"
    )


def test_a_wait_of_no_time_is_one_of_a_second_so_that_it_cannot_be_asked_without_end() -> None:
    harness = job("mine:choose", repair_patience_ms=3_600_000)
    harness.tray_lost("b")
    harness.park_all()
    for number in range(3):
        answers = answer(harness, Rung.WAIT, deadline_s=1e-9, reason=f"once more {number}")
        assert f"once more {number}" in only(Decided, answers).decision.reason, "each answer is told"
        assert only(SetTimer, answers).at_ms == harness.now + 1_000
        harness.now += 1_000
        assert question_in(harness.timer("repair")).question == number + 2


@pytest.mark.parametrize("waited_ms", [599_999, 599_998, 570, 1, 0])
def test_the_last_moment_of_a_wait_is_a_moment_later(waited_ms: int) -> None:
    """Not now, for ever, because a tenth of it was lost in floats."""
    harness = job("mine:choose", repair_patience_ms=600_000)
    harness.tray_lost("b")
    harness.park_all()
    answer(harness, Rung.WAIT)
    harness.now = waited_ms
    question_in(harness.timer("repair"))
    assert only(SetTimer, answer(harness, Rung.WAIT)).at_ms == 600_000
    harness.now = 600_000
    stop_in([*harness.timer("repair"), *answer(harness, None)])


def test_no_answer_at_all_is_given_up_by_the_cores_own_clock() -> None:
    harness = asked()
    timer = [timer for timer in every(SetTimer, harness.answers) if str(timer.timer).startswith("policy:")][-1]
    assert timer.at_ms == harness.now + ANSWER_MS
    answers = harness.tell(TimerFired(timer=timer.timer))
    assert "gave no answer" in only(Notice, answers).text
    plan_in(answers)
    assert not answer(harness, Rung.RESTART), "it comes too late"


def test_an_answer_about_a_situation_that_is_no_more_is_ignored() -> None:
    harness = asked()
    old = every(AskPolicy, harness.answers)[-1].question
    harness.exits("a/1")
    assert not answer(harness, Rung.RESTART, question=old)
    assert every(AskPolicy, harness.answers)[-1].failure.ranks == (1, 3)
    plan_in(answer(harness, Rung.SWAP))


def test_it_is_asked_again_when_a_wait_has_had_its_time() -> None:
    harness = job("mine:choose", repair_patience_ms=3_600_000)
    harness.tray_lost("b")
    harness.park_all()
    timers = every(SetTimer, answer(harness, Rung.WAIT, deadline_s=30.0))
    assert [(str(timer.timer), timer.at_ms) for timer in timers] == [("repair:2", 30_000)]
    harness.now = 30_000
    assert question_in(harness.timer("repair")).view.waited_s == 30.0
    assert stop_in(answer(harness, Rung.STOP, reason="enough")).because.count("enough") == 1


def test_the_same_events_lead_to_the_same_commands_though_a_function_was_asked() -> None:
    """The answer is an event: a journal told once more needs no user code."""
    harness, events = Recorded("mine:choose"), 0
    for rung in (Rung.SWAP, Rung.SHRINK, None):
        slot = harness.members[0]
        harness.exits(slot)
        harness.park_all()
        answer(harness, rung)
        harness.resume_all()
        for spare in harness.view.spares:
            if spare.state == "starting":
                harness.ready(spare.slot)
    again = ControlPlane(harness.config)
    for event, commands in harness.history:
        assert tuple(again.handle(event)) == tuple(commands)
        events += isinstance(event, PolicyAnswered)
    assert events == 3


class Recorded(CoreHarness):
    def __init__(self, policy: str) -> None:
        self.config = JobConfig(trays_min=2, trays_max=2, spares=2, policy_function=policy)
        super().__init__(self.config)
        self.history: list[tuple[Event, Sequence[Command]]] = []
        handle = self.core.handle

        def remembered(event: Event) -> Sequence[Command]:
            commands = handle(event)
            self.history.append((event, commands))
            return commands

        self.core.handle = remembered  # type: ignore[method-assign]
        self.join("a", 3)
        self.join("b", 3)
        self.train()


# -- what it is made from ----------------------------------------------------------------------------------------------
def test_costs_are_measured_from_what_the_core_sees_and_what_it_is_told() -> None:
    harness = CoreHarness(JobConfig(trays_min=2, trays_max=2, spares=2, policy_function="mine:choose"))
    harness.join("a", 3)
    harness.join("b", 3)
    harness.now = 4_000
    harness.train()
    harness.tell(CostsMeasured(step_s=0.5, state_bytes=2e9, copy_bytes_per_s=1e9, checkpoint=Step(1)))
    harness.exits("b/1")
    assert question_in(harness.park_all(passed=5)).view.costs.takeover_s is None
    answer(harness, None)
    harness.now = 4_300
    harness.resume_all()
    harness.exits("a/1")
    view = question_in(harness.park_all(passed=5)).view
    assert (view.recoveries, view.costs.start_s, view.costs.takeover_s, view.costs.regroup_s) == (1, 4.0, 0.3, None)
    assert (view.costs.step_s, view.costs.checkpoint_age_s) == (0.5, 2.0)


def test_a_repair_is_from_the_loss_of_a_tray_until_it_is_back() -> None:
    meter = CostMeter()
    joined = TrayJoined(tray=TrayId("a"), host="a", slots=3, store="a:1", snapshots="a:2")
    for event in (
        msgspec.structs.replace(joined, at_ms=5),
        TrayLost(tray=TrayId("a"), because="lease lapsed", at_ms=1_000),
        msgspec.structs.replace(joined, at_ms=61_000),
    ):
        meter.measure_event(event)
    assert meter.costs(0).repair_s == 60.0


# -- storms ------------------------------------------------------------------------------------------------------------
class Asked(Cluster):
    """Somebody answers what the core asks: at some time, perhaps not at all, and anything."""

    def __init__(self, config: JobConfig, slots: int, units: int, shards: str, rng: random.Random) -> None:
        super().__init__(config, slots, units, shards)
        self.rng = rng
        self.questions: list[int] = []
        self.decided: dict[str, int] = {}

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, AskPolicy):
            self.questions.append(command.question)
        elif isinstance(command, Decided):
            name = f"{command.decision.by} {command.decision.rung.value}"
            self.decided[name] = self.decided.get(name, 0) + 1
        else:
            super()._carry_out(command)

    def actions(self) -> list[tuple[str, Process]]:
        somebody = next(iter(self.processes.values()), None)
        return super().actions() + [("answer", somebody) for _ in self.questions if somebody is not None]

    def do(self, name: str, process: Process) -> None:
        if name != "answer":
            super().do(name, process)
            return
        question = self.questions.pop(self.rng.randrange(len(self.questions)))
        if self.rng.random() < 0.1:
            return  # never
        rung = self.rng.choice([None, *Rung, Rung.SWAP, Rung.SWAP, Rung.WAIT, Rung.ABSORB, Rung.ABSORB])
        deadline_s = self.rng.choice([0.0, 50.0])
        decision = None if rung is None else Decision(rung=rung, deadline_s=deadline_s)
        trouble = "failed" if self.rng.random() < 0.1 else ""
        self.tell(PolicyAnswered(question=question, decision=decision, trouble=trouble))


def test_whatever_a_function_answers_every_storm_ends_with_one_history_or_with_a_reason() -> None:
    seen: dict[str, int] = {}
    for seed in range(120):
        rng = random.Random(seed)
        trays, slots = rng.randint(1, 4), rng.randint(1, 3)
        config = JobConfig(
            trays_min=trays,
            trays_max=trays,
            spares=rng.randint(0, min(4, trays * slots - 1)),
            start_over=rng.random() < 0.7,
            no_progress_max=20,
            policy_function="mine:choose",
            repair_patience_ms=rng.choice([0, 0, 60_000]),
        )
        cluster = Asked(config, slots, rng.randint(5, 40), rng.choice(["replicas", "pairs", "unique"]), rng)
        try:
            play(cluster, trays, rng, KINDS, rng.choice([0.005, 0.02]))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
        assert cluster.stopped is not None
        for name, count in cluster.decided.items():
            seen[name] = seen.get(name, 0) + count
    for name in (
        "user swap",
        "user wait",
        "user hold",
        "user restart",
        "user stop",
        "user absorb",
        "default swap",
        "default absorb",
    ):
        assert seen.get(name), f"no {name} in {seen}"


def test_a_break_names_no_decision_that_is_not_taken_yet(training: CoreHarness) -> None:
    broken = training.exits("b/1")
    only(BreakGeneration, broken)
    assert not every(Decided, broken)


# -- a policy that changes ---------------------------------------------------------------------------------------------
def change(
    harness: CoreHarness, policy: str | None = None, weights: str | None = None, trouble: str = ""
) -> Sequence[Command]:
    return harness.tell(PolicyRequested(request="p", policy=policy, weights=weights, trouble=trouble))


def test_a_policy_that_is_changed_decides_from_then_on() -> None:
    harness = job("no-swap")
    assert only(Answer, change(harness, "swap")).text.startswith(
        "from now on: --policy swap --policy-weights goodput=1,"
    )
    assert harness.view.policy.startswith("--policy swap ")
    harness.exits("b/1")
    assert only(Decided, harness.park_all()).decision.by == "order"


def test_what_is_being_waited_for_is_decided_anew() -> None:
    harness = job("wait,stop", repair_patience_ms=60_000)
    for slot in ("a/2", "b/2"):
        harness.checks(slot, "its memory is bad")
    harness.exits("b/1")
    harness.checks("b/1", "its memory is bad")
    assert only(Decided, harness.park_all()).decision.rung is Rung.WAIT
    decided = only(Decided, change(harness, "stop"))
    assert decided.decision.rung is Rung.STOP


def test_a_function_that_becomes_the_policy_is_asked_and_one_that_is_none_any_more_is_not() -> None:
    harness = job()
    change(harness, "theirs:choose")
    harness.exits("b/1")
    asked = question_in(harness.park_all())
    assert asked.function == "theirs:choose"
    out = change(harness, "cheapest")
    assert only(Decided, out).decision.by == "default"
    assert not answer(harness, Rung.STOP, question=asked.question)


def test_what_cannot_be_a_policy_changes_nothing() -> None:
    harness = job("swap,wait")
    before = harness.view.policy
    for out in (
        change(harness, "swop"),
        change(harness, "swap,swap"),
        change(harness, "swap,acquire"),  # of whom? there is no provider
        change(harness, "a:b,c:d"),
        change(harness, "stop", "cost=-1"),
        change(harness, "theirs:choose", trouble="the policy theirs:choose cannot be loaded"),
    ):
        refused = only(Answer, out)
        assert (refused.outcome, refused.refusal, bool(refused.remedy)) == ("refused", "policy", True)
        assert harness.view.policy == before


def test_the_same_events_told_again_give_the_same_commands_after_a_change() -> None:
    events: list[Event] = []

    class Heard(ControlPlane):
        def handle(self, event: Event) -> Sequence[Command]:
            events.append(event)
            return super().handle(event)

    harness = CoreHarness(JobConfig(trays_min=2, trays_max=2, spares=2))
    harness.core = Heard(JobConfig(trays_min=2, trays_max=2, spares=2))
    harness.join("a", 3)
    harness.join("b", 3)
    harness.train()
    change(harness, "wait,swap", "cost=1")
    harness.exits("b/1")
    harness.park_all()
    again = ControlPlane(JobConfig(trays_min=2, trays_max=2, spares=2))
    assert [command for event in events for command in again.handle(event)] == harness.answers
