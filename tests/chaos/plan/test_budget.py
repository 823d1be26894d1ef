"""What a job can survive is said before it starts, where it is certain; and a plan that expects something else is refused."""

from __future__ import annotations

import msgspec
import pytest

from rackrun.chaos.base.errors import PlanError
from rackrun.chaos.base.job_layout import JobLayout, layout_of
from rackrun.chaos.faults.data.flip_bit import FlipBit
from rackrun.chaos.faults.data.poison_batch import PoisonBatch
from rackrun.chaos.faults.data.step_clock import StepClock
from rackrun.chaos.faults.fault_types import Subjects
from rackrun.chaos.faults.hangs.pause_process import Pause
from rackrun.chaos.faults.hangs.slow_down import Slow
from rackrun.chaos.faults.hardware.xid_error import Xid
from rackrun.chaos.faults.network.network_partition import Partition
from rackrun.chaos.faults.processes.crash_at_point import CrashAt
from rackrun.chaos.faults.processes.kill import Kill
from rackrun.chaos.faults.processes.raise_exception import Raise
from rackrun.chaos.faults.table.fault_table import Fault
from rackrun.chaos.faults.targets import BuddyOf, Last, Majority, One, Several, Target
from rackrun.chaos.plan.definition import AtStep, Every, Inject, Par, Part, Plan
from rackrun.chaos.plan.survivability import Label, check_budget, judge_plan

RANK, TRAY, RACK, COORDINATOR = Subjects.RANK, Subjects.TRAY, Subjects.RACK, Subjects.COORDINATOR
DDP = JobLayout(slots=4, spares=1, sharded=False)
FSDP = msgspec.structs.replace(DDP, sharded=True)
TRAYS = JobLayout(trays=3, slots=2, spares=2, sharded=False)
FIXED = JobLayout(trays=3, slots=2, spares=1, sharded=False, max_restarts=0, shrinks=False)
ON_DISK = JobLayout(trays=2, slots=2, spares=1, sharded=False, checkpoints=True, starts_over=True)


def strike(fault: Fault, target: Target, step: int = 12) -> Inject:
    return Inject(fault=fault, target=target, when=AtStep(step=step))


def label(part: Part, layout: JobLayout = DDP) -> Label:
    return judge_plan(Plan(plan=part), layout).label


@pytest.mark.parametrize(
    ("part", "layout"),
    [
        (strike(Kill(), One(RANK)), DDP),
        (strike(Kill(), One(RANK)), FSDP),
        (strike(Kill(), One(Subjects.SPARE)), DDP),
        (Par(parts=(strike(Raise(), One(RANK)), strike(CrashAt(point="gate.before"), One(RANK)))), DDP),
        (strike(Pause(for_s=0.5), One(RANK)), msgspec.structs.replace(DDP, slots=1, spares=0)),
        (strike(Pause(for_s=3.0), One(COORDINATOR)), DDP),
        (strike(Slow(), One(RANK)), msgspec.structs.replace(DDP, spares=0)),
        (strike(StepClock(by_s=9.0), One(Subjects.AGENT)), DDP),
        (strike(Xid(code=79), One(RANK)), DDP),
        (strike(Kill(), One(TRAY)), TRAYS),
        (strike(Kill(), One(TRAY)), msgspec.structs.replace(TRAYS, sharded=True)),
        (strike(Partition(for_s=1.0), One(TRAY)), TRAYS),
        (strike(Kill(), One(RACK)), ON_DISK),
        (strike(FlipBit(of="snapshot"), One(RANK)), FSDP),
    ],
)
def test_what_spares_and_copies_are_for_is_survivable(part: Part, layout: JobLayout) -> None:
    assert label(part, layout) is Label.SURVIVABLE


@pytest.mark.parametrize(
    ("part", "layout"),
    [
        (strike(Kill(), One(COORDINATOR)), DDP),
        (strike(CrashAt(point="x"), One(COORDINATOR)), DDP),
        (strike(Kill(), Several(RANK, 3)), DDP),
        (strike(Kill(), One(RACK)), TRAYS),
        (strike(Kill(), One(TRAY)), DDP),
        (strike(Kill(), One(TRAY)), FIXED),
        (strike(Kill(), One(RACK)), msgspec.structs.replace(ON_DISK, max_restarts=0)),
        (strike(PoisonBatch(), One(RANK)), DDP),
    ],
)
def test_what_leaves_nobody_or_no_copy_is_beyond(part: Part, layout: JobLayout) -> None:
    assert label(part, layout) is Label.BEYOND


@pytest.mark.parametrize(
    ("part", "layout"),
    [
        (strike(Kill(), Several(RANK, 3), step=3), DDP),  # it has only just begun
        (strike(Kill(), Several(RANK, 3)), FSDP),  # snapshots outlive their workers
        (strike(Kill(signal="ABRT"), Several(RANK, 2)), msgspec.structs.replace(DDP, slots=8, spares=2)),
        (Par(parts=(strike(Raise(), One(RANK)), strike(Raise(), One(RANK)))), msgspec.structs.replace(DDP, slots=8)),
        (
            Par(parts=tuple(strike(CrashAt(point=point), One(RANK)) for point in ("plan.before", "commit.after"))),
            msgspec.structs.replace(DDP, slots=8),
        ),
        (strike(Kill(), Majority(RANK)), msgspec.structs.replace(DDP, slots=2)),
        (Par(parts=tuple(strike(Kill(), One(RANK)) for _ in range(3))), DDP),
        (strike(Kill(), One(TRAY)), msgspec.structs.replace(TRAYS, spares=1)),  # a smaller world has other bits
        (strike(Kill(), One(TRAY)), msgspec.structs.replace(TRAYS, sharded=True, copies="local")),
        (strike(Kill(), One(TRAY)), msgspec.structs.replace(TRAYS, sharded=None, copies="local")),
        (
            Par(parts=(strike(Kill(), One(TRAY)), strike(Kill(), BuddyOf(Last(TRAY))))),
            msgspec.structs.replace(TRAYS, slots=1, sharded=True),
        ),
        (strike(FlipBit(of="parameters"), One(RANK)), DDP),
        (Par(parts=(strike(FlipBit(of="snapshot"), One(RANK)), strike(Kill(), One(RANK)))), FSDP),
        (Every(mean_s=5.0, part=strike(Kill(), One(RANK))), DDP),
        (Every(mean_s=5.0, times=9, part=strike(Kill(), One(RANK))), DDP),
        (strike(Pause(for_s=60.0), One(COORDINATOR)), DDP),
    ],
)
def test_what_depends_on_the_moment_is_unclear(part: Part, layout: JobLayout) -> None:
    assert label(part, layout) is Label.UNCLEAR


def test_a_plan_that_expects_what_cannot_be_is_refused() -> None:
    killed = strike(Kill(), One(COORDINATOR))
    with pytest.raises(PlanError, match="nobody takes its place") as error:
        check_budget(Plan(plan=killed), DDP)
    assert "expect: stops" in error.value.remedy
    check_budget(Plan(plan=killed, expect="stops"), DDP)
    with pytest.raises(PlanError, match="all it takes to go on"):
        check_budget(Plan(plan=strike(Kill(), One(RANK)), expect="stops"), DDP)


def test_what_is_unclear_or_of_a_job_of_unknown_size_runs_as_it_says() -> None:
    for expect in ("survives", "stops"):
        check_budget(msgspec.convert({"plan": {"do": "heal"}}, Plan), None)
        unclear = Plan(plan=strike(FlipBit(of="parameters"), One(RANK)), expect=expect)
        check_budget(unclear, DDP)
        check_budget(Plan(plan=strike(Kill(), One(RANK)), expect=expect), None)


def test_a_layout_is_read_from_the_command_and_written_as_one() -> None:
    command = ["--trays", "3", "--nproc_per_node=2", "--spares", "1", "--quiet", "train.py", "--trays", "9"]
    assert layout_of(command) == JobLayout(trays=3, slots=2, spares=1)
    for layout in (DDP, TRAYS, FIXED, ON_DISK, msgspec.structs.replace(DDP, copies="local")):
        assert layout_of([*layout.options(), "train.py"]) == msgspec.structs.replace(layout, sharded=None)
    assert layout_of(["--rack", "nvl72.yaml", "train.py"]) is None
    assert layout_of(["--nproc-per-node", "auto", "train.py"]) is None
    with pytest.raises(PlanError, match="invalid int"):
        layout_of(["--spares", "many", "train.py"])
