"""Whole jobs whose hardware and control fail: GPUs as their driver tells, trays that come back, agents and coordinators that crash, stand still
or are there twice. Every story ends as the training without faults, bit for bit, unless it is to stop."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from rackrun.chaos.faults.crash_points import points_of
from rackrun.chaos.faults.fault_types import Subjects
from rackrun.chaos.faults.hangs.pause_process import Pause
from rackrun.chaos.faults.hardware.gpu_failure import GpuFails
from rackrun.chaos.faults.hardware.xid_error import Xid
from rackrun.chaos.faults.processes.crash_at_point import CrashAt
from rackrun.chaos.faults.processes.duplicate_process import Duplicate
from rackrun.chaos.faults.processes.kill import Kill
from rackrun.chaos.faults.processes.preempt_tray import Preempt
from rackrun.chaos.faults.processes.return_tray import Return
from rackrun.chaos.faults.table.fault_table import Fault
from rackrun.chaos.faults.targets import BuddyOf, Exactly, Last, NeighbourOf, One, Target
from rackrun.chaos.plan.definition import AtPoint, AtStep, Inject, Now, Par, Part, Plan, Seq, Trigger
from rackrun.chaos.runs.reference_run import run_reference
from rackrun.chaos.runs.run_plan import Summary, run_plan

pytestmark = [pytest.mark.slow, pytest.mark.stories, pytest.mark.timeout(400)]

SCRIPT = Path(__file__).parents[1] / "scripts" / "tiny.py"
STEPS, HOLD, LATER = 80, 6, 40
AGENT, COORDINATOR, RACK, RANK, SPARE, TRAY = (
    Subjects.AGENT,
    Subjects.COORDINATOR,
    Subjects.RACK,
    Subjects.RANK,
    Subjects.SPARE,
    Subjects.TRAY,
)
RACKS = """
format: 1
trays: {{count: {trays}, gpus: 1}}
racks:
  - {{serial: "1825024170029", nvlink: {{domain: 5f4e0c3a-7d1b-4c6e-9a55-0d2f6b8e1c47, clique: 32766}}}}
"""
ANOTHER = """
  - {{serial: "1825024170030", nvlink: {{domain: 6f4e0c3a-7d1b-4c6e-9a55-0d2f6b8e1c47, clique: 32766}}}}
"""
FOREVER = "99"


class Told(Summary, frozen=True, kw_only=True):
    """And what is in its journal."""

    judged: tuple[str, ...]
    """Health of GPUs, in the order of verdicts."""
    planned: tuple[bool, ...]
    """Of each recovery: nobody was lost in it."""


Strike = Callable[..., Told]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``references(*command)``: the run of it without faults, done once."""
    known: dict[tuple[str, ...], Path] = {}

    def of(*command: str) -> Path:
        if command not in known:
            known[command] = tmp_path_factory.mktemp("without") / "reference"
            run_reference(command, known[command])
        return known[command]

    return of


@pytest.fixture(scope="module")
def racks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("racks")


@pytest.fixture
def strike(tmp_path: Path, references: Callable[..., Path], racks: Path) -> Strike:
    """``strike(*parts, spares=1, trays=4, racks=1, mode="ddp", expect="survives", strikes="", later="0", until="", at_its_end=False, options=()) -> Told``: all stand before step 6
    until so many strikes have begun (all parts; with "!": are confirmed), and the coordinator has given the command ``until``; before step 40
    until ``later``. ``at_its_end``: a strike comes after the last commit, which proves nothing of training, and must not disturb the end."""
    folder = racks

    def run(
        *parts: Part,
        spares: int = 1,
        trays: int = 4,
        racks: int = 1,
        mode: str = "ddp",
        expect: str = "survives",
        strikes: str = "",
        later: str = "0",
        until: str = "",
        at_its_end: bool = False,
        options: tuple[str, ...] = (),
    ) -> Told:
        file = folder / f"{trays}-{racks}.yaml"
        file.write_text((RACKS + ANOTHER * (racks - 1)).format(trays=trays // racks))
        command = ["--rack", str(file), "--spares", str(spares), *options]
        if mode == "fsdp":
            command += ["--preload", "torch.distributed.fsdp,torch.distributed.tensor"]
        command += [str(SCRIPT), str(STEPS), f"{HOLD},{LATER}", "{out}", f"{FOREVER},0", mode]
        plan = msgspec.convert({"plan": msgspec.to_builtins(Par(parts=parts)), "expect": expect, "seed": 3}, Plan)
        reference, out = references(*command), tmp_path / "out"
        env = {"TINY_STRIKES": f"{strikes or count(parts)},{later}", "TINY_UNTIL": until}
        summary = run_plan(plan, command, out=out, reference=reference, env=env)
        print(msgspec.json.format(msgspec.json.encode(summary), indent=1).decode(), file=sys.stderr)
        print((out / "faulted" / "stderr.txt").read_text(), file=sys.stderr)
        unproven = [verdict.oracle for verdict in summary.verdicts if verdict.holds is not True]
        assert unproven == (["strikes"] if at_its_end else []), summary
        assert summary.holds is (None if at_its_end else True)
        return told(summary, out / "faulted" / "run" / "journal.sqlite")

    return run


def count(parts: tuple[Part, ...]) -> int:
    return sum(count(part.parts) if isinstance(part, Seq | Par) else 1 for part in parts)


def told(summary: Summary, journal: Path) -> Told:
    with closing(sqlite3.connect(journal)) as connection:
        verdicts = "SELECT json_extract(body, '$.verdict.health') FROM events WHERE name = 'DeviceJudged' ORDER BY id"
        judged = [health for (health,) in connection.execute(verdicts)]
        bodies = connection.execute("SELECT body FROM recoveries ORDER BY generation")
        planned = [bool(msgspec.json.decode(body)["planned"]) for (body,) in bodies]
    return Told(**msgspec.structs.asdict(summary), judged=tuple(judged), planned=tuple(planned))


def at_hold(fault: Fault, target: Target, when: Trigger | None = None) -> Inject:
    return Inject(fault=fault, target=target, when=when or AtStep(step=HOLD - 1))


def early(fault: Fault, target: Target) -> Inject:
    """Before the others: it waits for something."""
    return at_hold(fault, target, AtStep(step=2))


def in_recovery(fault: Fault, target: Target, point: str = "break.before") -> Inject:
    return at_hold(fault, target, AtPoint(point=point))


def named(kind: Subjects, name: str) -> Exactly:
    return Exactly(kind, (name,))


# -- GPUs
def test_what_a_driver_says_for_information_disturbs_nobody(strike: Strike) -> None:
    said = [Xid(code=63), Xid(code=43), Xid(code=92), GpuFails(says="ecc")]
    summary = strike(*(at_hold(one, One(RANK)) for one in said), strikes="4!")
    assert not summary.recoveries
    assert not summary.judged


@pytest.mark.parametrize(
    ("fault", "health", "planned"),
    [
        (Xid(code=79), "lost", False),
        (Xid(code=119), "reset", False),
        (Xid(code=31), "app", False),
        (GpuFails(says="fabric"), "fabric", False),
        (GpuFails(says="row"), "degraded", True),
        (GpuFails(says="link"), "degraded", True),
    ],
    ids=lambda value: str(value) if isinstance(value, str | bool) else getattr(value, "says", None) or value.code,
)
def test_a_gpu_that_fails_leads_to_its_response(fault: Fault, health: str, planned: bool, strike: Strike) -> None:
    """Fenced, restarted after its process has failed, or left between two steps."""
    until = "PauseWorkers" if planned else "FenceWorker"
    summary = strike(at_hold(fault, One(RANK)), strikes="1!", until=until)
    assert summary.judged == (health,)
    assert summary.planned == (planned,)


def test_a_gpu_fails_under_the_spare_that_is_being_promoted(strike: Strike) -> None:
    taken = in_recovery(Xid(code=79), named(RANK, "1"), "place.before")
    strike(at_hold(Kill(), named(RANK, "1")), taken, spares=2, trays=5, strikes="1")


# -- trays
def test_a_tray_that_was_given_up_is_taken_back(strike: Strike) -> None:
    """While the others still stand where they lost it; then another rank is lost."""
    lost, back = at_hold(Kill(), named(TRAY, "tray-00")), at_hold(Return(), Last(TRAY), Now())
    summary = strike(Seq(parts=(lost, back, at_hold(Kill(), named(RANK, "1"), Now()))), options=("--max-restarts", "0"))
    assert summary.strikes[1].detail.startswith("tray-00 is back")


def test_a_tray_comes_back_in_the_middle_of_anothers_recovery(strike: Strike) -> None:
    first = at_hold(Kill(), named(TRAY, "tray-03"))
    then = at_hold(Kill(), named(TRAY, "tray-01"), Now())
    back = in_recovery(Return(), named(TRAY, "tray-03"))
    strike(Seq(parts=(first, then, back)), trays=5, spares=2, strikes="3!", options=("--max-restarts", "0"))


def test_a_tray_with_notice_leaves_between_two_steps(strike: Strike) -> None:
    summary = strike(at_hold(Preempt(notice_s=60.0), named(TRAY, "tray-00")), until="PauseWorkers")
    assert [one.detail.partition(",")[0].split(" ", 2)[2] for one in summary.strikes] == ["left by itself"]
    assert summary.planned == (True,)


def test_a_notice_that_is_too_short_is_a_lost_tray(strike: Strike) -> None:
    summary = strike(at_hold(Preempt(notice_s=0.0), named(TRAY, "tray-00")))
    assert summary.planned == (False,)


# -- racks
def test_a_whole_rack_is_lost_and_the_other_goes_on(strike: Strike) -> None:
    summary = strike(at_hold(Kill(), One(RACK)), trays=6, racks=2, spares=3)
    assert summary.strikes[0].whom[0].removeprefix("rack ") in ("1825024170029", "1825024170030")


def test_a_neighbour_is_in_the_same_nvlink_clique(strike: Strike) -> None:
    rank, near = at_hold(Kill(), One(RANK)), at_hold(Kill(), NeighbourOf(Last(RANK)), Now())
    strike(Seq(parts=(rank, near)), trays=6, racks=2, spares=2)


def test_the_buddy_of_a_tray_is_lost_right_after_it(strike: Strike) -> None:
    """With it the copies of its snapshots: no copy of a shard is left. The job has only just begun, so it begins again."""
    tray, buddy = at_hold(Kill(), named(TRAY, "tray-00")), at_hold(Kill(), BuddyOf(named(TRAY, "tray-00")))
    summary = strike(tray, buddy, mode="fsdp", trays=5, spares=2)
    assert summary.strikes[1].whom == ("tray tray-01",)
    assert "start again" in summary.recoveries[-1]


# -- control
def test_a_second_agent_and_a_second_coordinator_do_no_harm(strike: Strike) -> None:
    doubles = Seq(
        parts=(
            at_hold(Duplicate(), One(AGENT)),
            at_hold(Duplicate(), One(COORDINATOR), Now()),
            at_hold(Kill(), Last(AGENT), Now()),
        )
    )
    summary = strike(doubles)
    assert [one.detail.split(":")[0] for one in summary.strikes[1:2]] == [
        "a second coordinator was refused (exit code 2)"
    ]


def test_a_coordinator_that_stands_still_past_its_lease_is_waited_for(strike: Strike) -> None:
    summary = strike(at_hold(Pause(for_s=20.0), One(COORDINATOR)))
    assert not summary.recoveries


def test_a_coordinator_that_stands_still_in_a_recovery_hears_first_what_has_come_meanwhile(strike: Strike) -> None:
    summary = strike(at_hold(Kill(), One(RANK)), in_recovery(Pause(for_s=13.0), One(COORDINATOR)), strikes="1")
    assert len(summary.recoveries) == 1


@pytest.mark.parametrize("point", points_of(COORDINATOR))
def test_a_coordinator_that_crashes_ends_the_job_and_nothing_is_left(point: str, strike: Strike) -> None:
    """Wherever it does: all that there is of it dies with it."""
    function = point.partition(".")[0]
    parts = [early(CrashAt(point=point), One(COORDINATOR))]
    if function != "coordinator_heard":  # to this it comes anyhow, once the steps after the hold are done
        parts.append(at_hold(Kill(), named(AGENT, "tray-01")))
    spares = 0 if function == "coordinator_event" else 1  # one that is ready late would be an event before that
    begun = {"coordinator_close": "2", "coordinator_heard": "1"}.get(function, FOREVER)
    strike(*parts, spares=spares, expect="stops", strikes=begun)


OWN, ANOTHERS = "tray-01", "tray-02"
WHERE = {"agent_pass": ANOTHERS, "agent_tell": ANOTHERS, "agent_copy": ANOTHERS}


@pytest.mark.parametrize("point", points_of(AGENT))
def test_an_agent_crashes_while_a_rank_is_replaced(point: str, strike: Strike) -> None:
    """The lost rank's own agent, which has its place to empty and to fill; else another. Where agents give and keep copies of snapshots they come
    while all train: there the crash is the loss."""
    function = point.partition(".")[0]
    armed = early(CrashAt(point=point), named(AGENT, WHERE.get(function, OWN)))
    if function in ("agent_copy", "agent_keep"):
        strike(armed, mode="fsdp", trays=5, spares=2, later="1!")
        return
    ends = function == "agent_stop"
    strike(armed, at_hold(Kill(), named(RANK, "1")), trays=5, spares=2, later="0" if ends else "2!", at_its_end=ends)
