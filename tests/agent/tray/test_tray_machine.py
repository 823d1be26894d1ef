"""The rules of a tray: which worker is started, killed and reported, and when its agent leaves. No process, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import pytest

from rackrun.agent.tray import tray_facts as t
from rackrun.agent.tray.process_states import PROCESS_TRANSITIONS, ProcessRecord, ProcessState, ProcessTrigger
from rackrun.agent.tray.tray_machine import TrayMachine
from rackrun.errors import InvalidTransition
from rackrun.protocol.commands import (
    BreakGeneration,
    DismissTray,
    FenceWorker,
    GenerationPlan,
    Member,
    ReleaseWorkers,
    ResumeGeneration,
    StartWorker,
    StopJob,
    Worker,
)
from rackrun.protocol.events import (
    DepartureAnnounced,
    ScriptFailure,
    TrayStoodStill,
    WorkerExited,
    WorkerFinished,
    WorkerReady,
)
from rackrun.protocol.ids import Generation, Incarnation, Position, Rank, SlotId, TrayId
from rackrun.protocol.wire import Logged, UnitCommitted, UnitSealed

TRAY = TrayId("tray-0")
GRACE_S = 7.0
KILLED = 9


def worker(incarnation: int, index: int = 0) -> Worker:
    return Worker(SlotId(f"{TRAY}/{index}"), Incarnation(incarnation))


def start(incarnation: int, index: int = 0, *, spare: bool = False) -> StartWorker:
    return StartWorker(
        slot=SlotId(f"{TRAY}/{index}"),
        incarnation=Incarnation(incarnation),
        spare=spare,
        rank=Rank(index),
        world_size=2,
        generation=Generation(1),
        store="tray-0:1",
    )


def plan(*members: Worker, generation: int = 2) -> ResumeGeneration:
    found = tuple(
        Member(rank=Rank(rank), slot=one.slot, incarnation=one.incarnation) for rank, one in enumerate(members)
    )
    of = GenerationPlan(
        generation=Generation(generation), world_size=len(found), members=found, store="", layout=Generation(0), full=1
    )
    return ResumeGeneration(plan=of, because="a test")


def report(of: Worker, exit_code: int | None = None, signal: int | None = None) -> t.ReportExit:
    return t.ReportExit(of, exit_code, signal, None)


class TrayHarness:
    """A machine, and a short way to tell it something."""

    def __init__(self) -> None:
        self.machine = TrayMachine(TRAY, GRACE_S)
        self.now_s = 100.0

    def __call__(self, fact: t.TrayFact) -> list[t.TrayEffect]:
        return self.machine.handle(fact, self.now_s)

    def start(self, incarnation: int, index: int = 0, *, spare: bool = False) -> list[t.TrayEffect]:
        return self(t.CommandArrived(start(incarnation, index, spare=spare)))

    def fence(self, incarnation: int, index: int = 0) -> list[t.TrayEffect]:
        at = worker(incarnation, index)
        return self(t.CommandArrived(FenceWorker(slot=at.slot, incarnation=at.incarnation, because="a test")))

    def runs(self, incarnation: int, index: int = 0, *, spare: bool = False) -> Worker:
        self.start(incarnation, index, spare=spare)
        at = worker(incarnation, index)
        self(t.StoreFound(at))
        self(t.WorkerBorn(at))
        return at

    def ends(self, of: Worker, *, keeps: bool = False) -> list[t.TrayEffect]:
        return self(t.ProcessReaped(of, 0, None, keeps))

    def state(self, of: Worker) -> ProcessState | None:
        return self.machine.state_of(of)


@pytest.fixture
def harness() -> TrayHarness:
    return TrayHarness()


def kinds(effects: Iterable[t.TrayEffect]) -> list[type[t.TrayEffect]]:
    return [type(effect) for effect in effects]


# -- the table
@pytest.mark.parametrize(("state", "trigger"), list(product(ProcessState, ProcessTrigger)), ids=lambda one: one.value)
def test_every_pair_is_in_the_table_or_raises_and_then_changes_nothing(
    state: ProcessState, trigger: ProcessTrigger
) -> None:
    record = ProcessRecord(start(1), state)
    if trigger in PROCESS_TRANSITIONS[state]:
        record.move(trigger)
        assert record.state is PROCESS_TRANSITIONS[state][trigger]
    else:
        with pytest.raises(InvalidTransition):
            record.move(trigger)
        assert record.state is state


def test_every_state_can_be_reached_and_every_process_can_come_to_its_end() -> None:
    assert list(PROCESS_TRANSITIONS) == list(ProcessState)
    reached = {state for targets in PROCESS_TRANSITIONS.values() for state in targets.values()}
    assert reached == set(ProcessState) - {ProcessState.WAITING}
    ends = {ProcessState.GONE}
    for _ in ProcessState:
        ends |= {state for state, targets in PROCESS_TRANSITIONS.items() if ends & set(targets.values())}
    assert ends == set(ProcessState)


def test_an_invalid_transition_tells_the_story(harness: TrayHarness) -> None:
    at = harness.runs(1)
    with pytest.raises(InvalidTransition, match="tray-0/0 incarnation 1 is running and cannot found") as caught:
        harness(t.StoreFound(at))
    assert caught.value.story == ("waiting", "cleared", "found", "born")


# -- starts
def test_a_start_in_a_free_place_finds_the_store_then_asks_for_a_process(harness: TrayHarness) -> None:
    assert harness.start(1) == [t.AdmitWorker(start(1), None), t.FindStore(start(1))]
    assert harness(t.StoreFound(worker(1))) == [t.ForkWorker(start(1))]
    assert harness(t.WorkerBorn(worker(1))) == []
    assert harness.state(worker(1)) is ProcessState.RUNNING


def test_a_start_that_comes_twice_is_obeyed_once(harness: TrayHarness) -> None:
    harness.start(1)
    assert harness.start(1) == []
    harness.runs(1, index=1)
    assert harness.start(1, index=1) == []


def test_a_start_of_an_older_incarnation_is_ignored_even_if_the_place_is_free(harness: TrayHarness) -> None:
    harness.ends(harness.runs(2))
    assert harness.start(1) == []
    assert harness.start(2) == []


def test_a_second_start_kills_the_first_process_and_waits_until_it_is_gone(harness: TrayHarness) -> None:
    first = harness.runs(1)
    assert harness.start(2) == [t.KillWorker(first), t.AdmitWorker(start(2), None)]
    assert harness(t.EndSeen(first, None, KILLED)) == [
        t.SpareLeaves(first, "the spare is gone"),
        report(first, None, 9),
    ]
    assert harness.state(worker(2)) is ProcessState.WAITING
    assert kinds(harness(t.ProcessReaped(first, None, KILLED, False))) == [t.BuryWorker, t.ForgetWorker, t.FindStore]


def test_a_second_start_takes_the_place_of_one_that_still_waits(harness: TrayHarness) -> None:
    first = harness.runs(1)
    harness.start(2)
    effects = harness.start(3)
    assert report(worker(2), None, KILLED) in effects
    assert effects[-1] == t.AdmitWorker(start(3), None)
    assert t.FindStore(start(3)) in harness.ends(first)


def test_a_second_start_takes_the_place_of_one_whose_store_is_being_found(harness: TrayHarness) -> None:
    harness.start(1)
    effects = harness.start(2)
    assert report(worker(1), None, KILLED) in effects
    assert effects[-1] == t.FindStore(start(2))
    assert harness(t.StoreFound(worker(1))) == [], "its answer comes too late"


def test_a_start_that_fails_is_reported_with_its_reason_and_its_place_is_free(harness: TrayHarness) -> None:
    harness.start(1)
    effects = harness(t.WorkerStartFailed(worker(1), "no store"))
    assert t.PrintLine("tray-0/0 cannot start: no store") in effects
    failure = ScriptFailure(type="rackrun.StartFailed", message="no store", traceback="", where="rackrun.agent")
    assert t.ReportExit(worker(1), None, None, failure) in effects
    assert kinds(harness.start(2)) == [t.AdmitWorker, t.ForgetWorker, t.FindStore]


def test_the_starts_that_a_dead_fork_server_was_asked_for_fail_and_the_others_go_on(harness: TrayHarness) -> None:
    runs = harness.runs(1, 0)
    harness.start(2, 1)
    harness.start(3, 2)
    harness(t.StoreFound(worker(3, 2)))
    effects = harness(t.ForkServerDied())
    assert [one.worker for one in effects if isinstance(one, t.ReportExit)] == [worker(3, 2)]
    assert harness.state(runs) is ProcessState.RUNNING, "its end is seen when it is reaped"
    assert harness(t.StoreFound(worker(2, 1))) == [t.ForkWorker(start(2, 1))]


# -- fences
def test_a_fenced_worker_is_killed_and_its_exit_is_reported_when_it_is_seen(harness: TrayHarness) -> None:
    at = harness.runs(1)
    assert harness.fence(1) == [t.SpareLeaves(at, "the spare is fenced"), t.KillWorker(at)]
    assert harness.state(at) is ProcessState.FENCING
    assert report(at, None, KILLED) in harness(t.EndSeen(at, None, KILLED))


def test_a_fence_of_a_worker_that_is_gone_or_was_never_here_is_ignored(harness: TrayHarness) -> None:
    harness.ends(harness.runs(1))
    assert harness.fence(1) == []
    assert harness.fence(7) == []
    assert harness.fence(7, index=3) == []


def test_a_fence_of_a_stale_incarnation_leaves_the_present_one_alone(harness: TrayHarness) -> None:
    harness.ends(harness.runs(1))
    at = harness.runs(2)
    assert harness.fence(1) == []
    assert harness.state(at) is ProcessState.RUNNING


def test_a_fence_before_the_process_was_asked_for_prevents_it_and_is_answered_at_once(harness: TrayHarness) -> None:
    harness.start(1)
    assert report(worker(1), None, KILLED) in harness.fence(1)
    assert harness(t.StoreFound(worker(1))) == []
    assert harness.state(worker(1)) is ProcessState.GONE


def test_a_fence_while_the_process_is_being_forked_kills_it_as_soon_as_it_exists(harness: TrayHarness) -> None:
    harness.start(1)
    harness(t.StoreFound(worker(1)))
    assert t.KillWorker(worker(1)) in harness.fence(1), "the effect holds for a process to come"
    assert harness(t.WorkerBorn(worker(1))) == []
    assert harness.state(worker(1)) is ProcessState.FENCING


def test_a_fence_that_comes_twice_does_no_harm(harness: TrayHarness) -> None:
    at = harness.runs(1)
    assert harness.fence(1) == harness.fence(1) == [t.SpareLeaves(at, "the spare is fenced"), t.KillWorker(at)]


# -- ends
def test_an_exit_is_reported_once_however_often_it_is_seen(harness: TrayHarness) -> None:
    at = harness.runs(1)
    assert report(at, None, 11) in harness(t.EndSeen(at, None, 11))
    assert harness(t.EndSeen(at, None, 11)) == []
    assert harness(t.ProcessReaped(at, None, 11, False)) == [t.BuryWorker(at)]
    assert harness(t.EndSeen(at, None, 11)) == []


def test_an_exit_that_is_seen_only_when_it_is_reaped_is_reported_then(harness: TrayHarness) -> None:
    at = harness.runs(1)
    assert harness.ends(at) == [t.SpareLeaves(at, "the spare is gone"), report(at, 0), t.BuryWorker(at)]


def said_exit(of: Worker) -> t.WorkerSaid:
    return t.WorkerSaid(of, WorkerExited(slot=of.slot, incarnation=of.incarnation, exit_code=1, signal=None))


def test_a_script_that_is_over_is_reported_at_once_and_killed_when_its_grace_is_over(harness: TrayHarness) -> None:
    at = harness.runs(1)
    deadline = t.GraceOver(at)
    effects = harness(said_exit(at))
    assert effects == [
        t.SpareLeaves(at, "the spare is gone"),
        report(at, 1),
        t.SetDeadline(deadline, harness.now_s + GRACE_S),
    ]
    assert harness(t.DeadlinePassed(deadline)) == [t.KillWorker(at)]
    assert harness(t.ProcessReaped(at, None, KILLED, False)) == [t.BuryWorker(at)]


def test_the_grace_of_a_worker_that_has_ended_in_time_does_not_touch_the_next_one(harness: TrayHarness) -> None:
    at = harness.runs(1)
    harness(said_exit(at))
    harness.ends(at)
    harness.runs(2)
    assert harness(t.DeadlinePassed(t.GraceOver(at))) == []


def test_a_script_that_is_over_before_its_birth_is_known_still_has_a_process(harness: TrayHarness) -> None:
    harness.start(1)
    harness(t.StoreFound(worker(1)))
    assert report(worker(1), 1) in harness(said_exit(worker(1)))
    assert harness(t.WorkerBorn(worker(1))) == []
    assert harness.ends(worker(1)) == [t.BuryWorker(worker(1))]


def test_a_start_that_dies_with_the_fork_server_after_its_exit_was_reported_is_not_reported_again(
    harness: TrayHarness,
) -> None:
    harness.start(1)
    harness(t.StoreFound(worker(1)))
    harness(said_exit(worker(1)))
    assert not [one for one in harness(t.ForkServerDied()) if isinstance(one, t.ReportExit)]
    assert harness.state(worker(1)) is ProcessState.GONE


def test_a_start_waits_for_exit_handlers_only_as_long_as_it_takes_to_kill_them(harness: TrayHarness) -> None:
    at = harness.runs(1)
    harness(said_exit(at))
    assert harness.start(2) == [t.KillWorker(at), t.AdmitWorker(start(2), None)]


def test_a_slot_keeps_what_its_last_two_workers_with_snapshots_have_left(harness: TrayHarness) -> None:
    for incarnation, keeps in ((1, True), (2, False), (3, True), (4, True)):
        harness.ends(harness.runs(incarnation), keeps=keeps)
    assert harness.start(5)[1:-1] == [t.ForgetWorker(worker(1))], "2 was forgotten when 3 was started"
    assert harness.state(worker(2)) is None
    assert harness.state(worker(3)) is ProcessState.GONE


# -- messages
def test_commands_are_passed_on_to_workers_of_this_tray_that_are_not_gone(harness: TrayHarness) -> None:
    harness.ends(harness.runs(1))
    here = harness.runs(2)
    harness.start(3, 1)
    named = (worker(1), here, worker(3, 1), worker(4, 1), Worker(SlotId("tray-9/0"), Incarnation(2)))
    for command in (
        ReleaseWorkers(workers=named),
        BreakGeneration(generation=Generation(3), workers=named, because="a test"),
        plan(*named),
    ):
        assert harness(t.CommandArrived(command)) == [t.PassOn(command, (here, worker(3, 1)))]


def test_a_plan_that_comes_before_the_workers_that_it_names_is_given_to_them_when_they_start(
    harness: TrayHarness,
) -> None:
    first = plan(worker(1), worker(2, 1))
    assert harness(t.CommandArrived(first)) == [t.PassOn(first, ())]
    assert harness.start(1)[0] == t.AdmitWorker(start(1), first)
    assert harness.start(3, 1)[0] == t.AdmitWorker(start(3, 1), None)


def committed(of: Worker) -> UnitCommitted:
    at = {"generation": Generation(1), "rank": Rank(0), "at": Position(3)}
    return UnitCommitted(slot=of.slot, incarnation=of.incarnation, **at)  # type: ignore[arg-type]


def test_what_a_worker_says_is_forwarded_by_its_kind_and_events_not_after_its_exit(harness: TrayHarness) -> None:
    at = harness.runs(1)
    finished = t.WorkerSaid(at, WorkerFinished(slot=at.slot, incarnation=at.incarnation))
    log = Logged(
        slot=at.slot, incarnation=at.incarnation, generation=Generation(1), rank=Rank(0), at=Position(1), values={}
    )
    assert harness(finished) == [t.Forward(t.Urgency.NOW)]
    assert harness(t.WorkerSaid(at, committed(at))) == [t.Forward(t.Urgency.SOON)]
    assert harness(t.WorkerSaid(at, log)) == [t.Forward(t.Urgency.MAYBE)]
    sealed = UnitSealed(slot=at.slot, incarnation=at.incarnation, generation=Generation(1), at=Position(1))
    assert harness(t.WorkerSaid(at, sealed)) == [], "the agent says that"
    harness(said_exit(at))
    assert harness(finished) == []
    assert harness(t.WorkerSaid(at, committed(at))) == [t.Forward(t.Urgency.SOON)]
    harness.ends(at)
    assert harness(finished) == []


def test_a_worker_that_sends_what_is_no_message_is_killed(harness: TrayHarness) -> None:
    at = harness.runs(1)
    effects = harness(t.WorkerGarbled(at, "truncated"))
    assert effects == [t.PrintLine("tray-0/0 sent what is no message, and is killed: truncated"), t.KillWorker(at)]


@pytest.mark.parametrize(("spare", "named", "waits"), [(True, False, True), (True, True, False), (False, False, False)])
def test_a_filler_may_run_beside_a_ready_spare_that_no_plan_names(
    harness: TrayHarness, spare: bool, named: bool, waits: bool
) -> None:
    at = harness.runs(1, spare=spare)
    if named:
        harness(t.CommandArrived(plan(at)))
    effects = harness(t.WorkerSaid(at, WorkerReady(slot=at.slot, incarnation=at.incarnation)))
    assert effects == [t.Forward(t.Urgency.NOW), *([t.SpareWaits(at)] if waits else [])]


# -- the end of the agent
def asked() -> t.LeaveAsked:
    return t.LeaveAsked("SIGTERM", 143)


def test_a_standstill_is_reported_as_long_as_the_agent_does_not_end(harness: TrayHarness) -> None:
    harness.runs(1)
    assert harness(t.StoodStill(4_200)) == [t.SendEvent(TrayStoodStill(tray=TRAY, for_ms=4_200))]
    alone = TrayStoodStill(tray=TRAY, for_ms=4_200, workers_ran=True)
    assert harness(t.StoodStill(4_200, workers_ran=True)) == [t.SendEvent(alone)]
    harness(t.StopBegun(failed=False))
    assert not harness(t.StoodStill(4_200))


def test_a_tray_that_is_asked_to_leave_announces_it_and_leaves_when_it_is_dismissed(harness: TrayHarness) -> None:
    announced = t.SendEvent(DepartureAnnounced(tray=TRAY, because="SIGTERM", exit_code=143))
    assert harness(asked()) == [announced, t.SetDeadline(t.DepartureOver(), harness.now_s + GRACE_S)]
    assert harness.start(1)[-1] == t.FindStore(start(1)), "until then it works on"
    assert harness(t.CommandArrived(DismissTray(tray=TRAY, because="a test"))) == [t.Leave(failed=False)]
    assert harness(t.DeadlinePassed(t.DepartureOver())) == []


@pytest.mark.parametrize("fact", [asked(), t.DeadlinePassed(t.DepartureOver())], ids=["asked twice", "time is up"])
def test_a_tray_whose_time_to_leave_is_up_leaves_at_once(harness: TrayHarness, fact: t.TrayFact) -> None:
    harness(asked())
    assert harness(fact) == [t.Leave(failed=True)]


@pytest.mark.parametrize("exit_code", [0, 3])
def test_the_first_reason_to_leave_counts(harness: TrayHarness, exit_code: int) -> None:
    assert harness(t.CommandArrived(StopJob(exit_code=exit_code, because="a test"))) == [t.Leave(failed=exit_code != 0)]
    assert harness(t.CommandArrived(DismissTray(tray=TRAY, because="a test"))) == []
    assert harness(t.JobOver(connected=False)) == []


def test_when_the_job_is_over_only_an_agent_without_a_coordinator_leaves_by_itself(harness: TrayHarness) -> None:
    assert harness(t.JobOver(connected=True)) == []
    assert harness(t.JobOver(connected=False)) == [t.Leave(failed=True)]


@pytest.mark.parametrize(("failed", "grace_s"), [(False, GRACE_S), (True, 1.0)])
def test_workers_get_sigterm_then_sigkill_then_are_left_to_the_kernel(
    harness: TrayHarness, failed: bool, grace_s: float
) -> None:
    at = harness.runs(1)
    assert harness(t.StopBegun(failed)) == [
        t.TerminateWorker(at),
        t.SetDeadline(t.StopGraceOver(), harness.now_s + grace_s),
    ]
    harness.now_s += grace_s
    assert harness(t.DeadlinePassed(t.StopGraceOver())) == [
        t.KillWorker(at),
        t.SetDeadline(t.KillOver(), harness.now_s + 10.0),
    ]
    assert kinds(harness(t.DeadlinePassed(t.KillOver()))) == [t.PrintLine, t.Emptied]
    assert t.Emptied() not in harness.ends(at), "it is said once"


def test_a_stop_is_over_when_the_last_worker_is_gone(harness: TrayHarness) -> None:
    first, second = harness.runs(1), harness.runs(2, 1)
    harness(t.StopBegun(failed=True))
    assert t.Emptied() not in harness.ends(first)
    assert harness.ends(second)[-1] == t.Emptied()
    assert harness(t.DeadlinePassed(t.StopGraceOver())) == []
    assert harness(t.DeadlinePassed(t.KillOver())) == []


def test_a_stop_of_an_empty_tray_is_over_at_once(harness: TrayHarness) -> None:
    harness.ends(harness.runs(1))
    assert harness(t.StopBegun(failed=False)) == [t.Emptied()]


def test_a_stop_gives_up_the_starts_that_wait_or_have_no_process_and_obeys_no_new_one(harness: TrayHarness) -> None:
    first = harness.runs(1)
    harness.start(2)
    harness.start(3, 1)
    effects = harness(t.StopBegun(failed=True))
    assert {one.worker for one in effects if isinstance(one, t.ReportExit)} == {worker(2), worker(3, 1)}
    assert not [one for one in harness.ends(first) if isinstance(one, t.FindStore)]
    assert harness.start(9, 2) == []


def test_a_stop_kills_a_process_that_is_being_forked_as_soon_as_it_exists(harness: TrayHarness) -> None:
    harness.start(1)
    harness(t.StoreFound(worker(1)))
    assert t.KillWorker(worker(1)) in harness(t.StopBegun(failed=False))
