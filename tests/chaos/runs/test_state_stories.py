"""Whole jobs whose storage, memory, clocks or data fail: they end as the job without faults, or stop and say why.

A job stands where it is to be struck, and where a checkpoint is to be there first: see ``scripts/stored.py``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rackrun.chaos.faults.data.flip_bit import FlipBit
from rackrun.chaos.faults.data.poison_batch import PoisonBatch
from rackrun.chaos.faults.data.step_clock import StepClock
from rackrun.chaos.faults.fault_types import Subjects
from rackrun.chaos.faults.processes.exhaust_memory import ExhaustMemory
from rackrun.chaos.faults.processes.kill import Kill
from rackrun.chaos.faults.storage.disk_failure import DiskFails
from rackrun.chaos.faults.storage.disk_full import DiskFull
from rackrun.chaos.faults.table.fault_table import Fault
from rackrun.chaos.faults.targets import Exactly, One, Target
from rackrun.chaos.injectors.resources.memory_exhaustion import memory_here
from rackrun.chaos.plan.definition import AtStep, Heal, Inject, Par, Part, Plan, Quiet, Seq
from rackrun.chaos.runs.reference_run import run_reference
from rackrun.chaos.runs.run_plan import Summary, run_plan
from rackrun.chaos.testbed.machine.fake_clock import can_move
from rackrun.chaos.testbed.machine.leaked_resources import can_be_private

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parents[1] / "scripts" / "stored.py"
SHARDED = ("--preload", "torch.distributed.fsdp,torch.distributed.tensor")
DISK, EVERYBODY = One(Subjects.STORAGE), Exactly(Subjects.RANK, ("0", "1"))
STEPS = 16
SEEDS = {"manifest": 3, "record": 1, "shard": 2}
"""Which of a checkpoint's files they draw."""


@dataclass
class Told:
    summary: Summary
    stderr: str

    @property
    def wrong(self) -> dict[str, bool | None]:
        return {verdict.oracle: verdict.holds for verdict in self.summary.verdicts if verdict.holds is not True}


@pytest.fixture
def story(tmp_path: Path, references: Callable[[list[str]], Path]) -> Callable[..., Told]:
    """``story(parts, holds, mode="ddp", options=()) -> Told``: 2 ranks and a spare, with a checkpoint after every other step. Each is waited for,
    or the next might be skipped; not if ``hurried``."""

    def run(
        *parts: Part,
        holds: str,
        mode: str = "ddp",
        options: tuple[str, ...] = (),
        expect: Any = "survives",
        hurried: bool = False,
        struck: int = -1,
        checkpoints: bool = True,
        seed: int = 3,
    ) -> Told:
        sharded = SHARDED if mode == "fsdp" else ()
        to_disk = ("--checkpoint-dir", "{out}/checkpoints", "--checkpoint-every", "2") if checkpoints else ()
        command = ["--nproc-per-node", "3", "--spares", "1", *sharded, *to_disk, *options]
        command += [str(SCRIPT), str(STEPS), "{out}", mode]
        plan = Plan(plan=Seq(parts=parts), expect=expect, seed=seed)
        held = {one.partition(":")[0] for one in holds.split(",")}
        more = [f"{step}:0" for step in range(2, STEPS, 2) if str(step) not in held and not hurried]
        env = {"STORED_HOLDS": ",".join([holds, *more]), "STORED_STRUCK": str(struck)}
        summary = run_plan(plan, command, out=tmp_path / "out", reference=references(command), env=env)
        told = Told(summary, (tmp_path / "out" / "faulted" / "stderr.txt").read_text())
        print(msgspec.json.format(msgspec.json.encode(summary), indent=1).decode(), told.stderr, file=sys.stderr)
        return told

    return run


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[str]], Path]:
    """The run of a command without faults, once. It holds nowhere."""
    made: dict[tuple[str, ...], Path] = {}

    def of(command: list[str]) -> Path:
        name = tuple(command)
        if name not in made:
            made[name] = tmp_path_factory.mktemp("without") / "reference"
            run_reference(command, made[name])
        return made[name]

    return of


def after(step: int, fault: Fault, target: Target) -> Inject:
    return Inject(fault=fault, target=target, when=AtStep(step=step))


def lost(step: int) -> Inject:
    """Both ranks, and with them all copies of the state."""
    return after(step, Kill(), EVERYBODY)


mounting = pytest.mark.skipif(not can_be_private(), reason="nothing can be mounted here")


# -- storage
@pytest.mark.stories
@mounting
def test_the_disk_is_full_and_is_freed_and_then_all_is_lost(story: Callable[..., Told]) -> None:
    full = after(5, DiskFull(), DISK)
    told = story(full, Quiet(steps=4), Heal(), lost(12), holds="6:1,10:2,12:2:11,13:3")
    assert told.summary.holds is True
    assert told.stderr.count("could not be written: full") == 2, "once by each rank"
    assert "resumed after step 11" in told.stderr


@mounting
@pytest.mark.stories
def test_all_is_lost_while_the_disk_is_full(story: Callable[..., Told]) -> None:
    told = story(after(5, DiskFull(), DISK), lost(8), Quiet(steps=2), Heal(), holds="6:1:5,9:2")
    assert told.summary.holds is True
    assert "resumed after step 5" in told.stderr


@pytest.mark.stories
@pytest.mark.parametrize(
    ("call", "error"), [("fsync", "EIO"), ("rename", "EIO"), ("write", "EIO"), ("write", "ENOSPC"), ("write", "EROFS")]
)
def test_calls_fail_for_a_moment_and_the_next_checkpoints_are_whole(
    call: Any, error: Any, story: Callable[..., Told]
) -> None:
    """It begins after step 6, when nothing is written: the first call that fails is of the checkpoint of step 7."""
    fails = after(6, DiskFails(call=call, error=error), DISK)
    told = story(fails, Heal(), lost(12), holds="7:1,8:2,12:2:11,13:3")
    assert told.summary.holds is True
    assert "could not be written" in told.stderr
    assert "resumed after step 11" in told.stderr


@pytest.mark.stories
@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_storage_that_stands_still_keeps_nobody_from_training(call: Any, story: Callable[..., Told]) -> None:
    """What the plan waits for would never come."""
    still = after(5, DiskFails(call=call, error="slow", slow_s=3600.0), DISK)
    told = story(still, Quiet(steps=3), Heal(), holds="6:1,14:2", struck=8, hurried=True)
    assert told.summary.holds is True
    assert told.stderr.count("is skipped: an older one") <= 2, "once by each rank, at the most"


@pytest.mark.stories
def test_a_torn_checkpoint_is_not_taken_but_the_one_before(story: Callable[..., Told]) -> None:
    torn = after(5, DiskFails(call="write", error="torn"), DISK)
    told = story(torn, Heal(), lost(8), holds="6:1:5,8:2,9:3")
    assert told.summary.holds is True
    assert "the checkpoint of step 7 could not be written: disagrees" in told.stderr, "it is read back"
    assert "resumed after step 5" in told.stderr
    assert "steps 6 to 8 done again" in told.stderr


@pytest.mark.stories
@pytest.mark.parametrize("seed", SEEDS.values(), ids=SEEDS)
def test_a_checkpoint_with_a_flipped_bit_is_not_taken_but_the_one_before(seed: int, story: Callable[..., Told]) -> None:
    flip = after(8, FlipBit(of="checkpoint"), DISK)
    told = story(flip, lost(8), holds="6:0:5,8:0:7,9:2", seed=seed)
    assert told.summary.holds is True
    assert "the checkpoint of step 7 is not used" in told.stderr
    assert "resumed after step 5" in told.stderr


@pytest.mark.stories
def test_storage_that_cannot_be_read_stops_a_job_that_has_lost_all_and_it_says_so(story: Callable[..., Told]) -> None:
    unreadable = after(7, DiskFails(call="read"), DISK)
    told = story(Par(parts=(unreadable, lost(8))), holds="6:0:5,8:1,9:2", expect="stops")
    assert told.summary.holds is True
    ending = next(verdict.because for verdict in told.summary.verdicts if verdict.oracle == "ending")
    assert "checkpoints" in ending
    assert "cannot be used: [Errno 5] chaos: Input/output error" in ending


# -- memory
@pytest.mark.stories
def test_a_damaged_snapshot_is_not_used_when_its_neighbour_is_lost(story: Callable[..., Told]) -> None:
    """Snapshots are of even steps, so both go back to that of step 4; rank 0 finds its own damaged, and both go back to step 2."""
    flip = after(5, FlipBit(of="snapshot"), Exactly(Subjects.RANK, ("0",)))
    told = story(flip, after(5, Kill(), Exactly(Subjects.RANK, ("1",))), holds="6:2", mode="fsdp", checkpoints=False)
    assert told.summary.holds is True
    assert "the snapshot of step 4 cannot be used" in told.stderr
    assert "back to the state after step 2" in told.stderr


@pytest.mark.stories
def test_a_damaged_snapshot_is_not_used_when_its_owner_is_lost(story: Callable[..., Told]) -> None:
    """Nor is its copy on another tray, if it was made from the damaged one: whoever took it has verified it."""
    owner = Exactly(Subjects.RANK, ("0",))
    options = ("--trays", "3", "--nproc-per-node", "1")
    told = story(
        after(5, FlipBit(of="snapshot"), owner),
        after(5, Kill(), owner),
        holds="6:2",
        mode="fsdp",
        options=options,
        checkpoints=False,
    )
    assert told.summary.holds is True
    assert "cannot be used" in told.stderr


@pytest.mark.stories
@pytest.mark.skipif(memory_here(os.getpid()) is None, reason="no control group can limit memory here")
def test_a_rank_without_memory_is_replaced(story: Callable[..., Told]) -> None:
    told = story(after(5, ExhaustMemory(), One(Subjects.RANK)), holds="6:1")
    assert told.summary.holds is True
    assert len(told.summary.recoveries) == 1


# -- clocks
@pytest.mark.stories
@pytest.mark.skipif(bool(can_move()), reason="wall clocks of single processes cannot be moved here")
@pytest.mark.parametrize("by_s", [3600.0, -3600.0])
def test_clocks_that_jump_change_nothing(by_s: float, story: Callable[..., Told]) -> None:
    agent = after(3, StepClock(by_s=by_s), One(Subjects.AGENT))
    coordinator = after(5, StepClock(by_s=-by_s), One(Subjects.COORDINATOR))
    told = story(agent, coordinator, after(7, Kill(), One(Subjects.RANK)), holds="4:1,6:2,8:3")
    assert told.summary.holds is True
    assert [line.partition(" lost")[0][:-1] for line in told.summary.recoveries] == ["rank "], "the one that was killed"


# -- data
@pytest.mark.stories
def test_a_sample_that_raises_wherever_it_is_computed_stops_the_job_as_its_scripts_fault(
    story: Callable[..., Told],
) -> None:
    told = story(after(5, PoisonBatch(), One(Subjects.RANK)), holds="6:1", expect="stops")
    assert told.summary.holds is True
    ending = next(verdict.because for verdict in told.summary.verdicts if verdict.oracle == "ending")
    assert "exit code 1" in ending
    assert "not the hardware's" in ending


@pytest.mark.stories
def test_a_sample_that_makes_the_loss_nan_is_the_scripts_and_no_rank_is_blamed(story: Callable[..., Told]) -> None:
    """Training goes on with it, so it is not the training without it: the oracles say so, and nothing else is wrong."""
    told = story(after(5, PoisonBatch(how="nan"), One(Subjects.RANK)), holds="6:1", options=("--nan-probation",))
    assert told.wrong == {"losses": False, "weights": False}
    losses = next(verdict.because for verdict in told.summary.verdicts if verdict.oracle == "losses")
    assert losses.startswith("the loss of step 6, phase 0 is nan")
    assert (
        "the loss of step 6 is not finite, and again when it is computed once more: it is the script's" in told.stderr
    )
    assert not told.summary.recoveries
