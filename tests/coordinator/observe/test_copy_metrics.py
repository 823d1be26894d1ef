"""The metrics of copies say of a step what holds for every rank, and where each rank was restored from."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from rackrun.coordinator.observe.metrics import Metrics
from rackrun.coordinator.observe.recoveries import RecoveryRecord, RecoveryWatch
from rackrun.protocol.commands import BreakGeneration, GenerationPlan, Restore, ResumeGeneration
from rackrun.protocol.events import SnapshotDamaged, SnapshotMirrored, TrayJoined
from rackrun.protocol.ids import Generation, Incarnation, Position, Rank, SlotId, Step, TrayId, snapshot_id
from rackrun.protocol.wire import StateCopied
from tests.coordinator.fakes import member, plan

WORLD = plan(1, member(0, "tray-00/0", 1), member(1, "tray-01/0", 2))


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("job-1", lambda: WORLD)


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"rackrun_{name}", labels)


def copied(
    rank: int, kind: str, step: int, outcome: str = "done", *, size: int = 0, seconds: float = 0.0
) -> StateCopied:
    return StateCopied(
        slot=SlotId("tray-00/0"), incarnation=Incarnation(1), generation=Generation(1), rank=Rank(rank), at=Position(step),
        kind=kind, outcome=outcome, bytes=size, seconds=seconds,
    )  # fmt: skip


def mirrored(slot: str, incarnation: int, *steps: int) -> SnapshotMirrored:
    return SnapshotMirrored(
        generation=Generation(1),
        slot=SlotId(slot), incarnation=Incarnation(incarnation), holder=TrayId("tray-09"), where="h:1/x",
        steps=tuple(Step(step) for step in steps),
    )  # fmt: skip


def test_a_step_counts_when_every_rank_has_come_to_it(metrics: Metrics) -> None:
    assert value(metrics, "snapshot_step") == value(metrics, "snapshot_mirrored_step") == -1
    metrics.copies.record_copy(copied(0, "snapshot", 4, size=100, seconds=0.02))
    metrics.copies.record_event(mirrored("tray-00/0", 1, 2, 4))
    assert value(metrics, "snapshot_step") == value(metrics, "snapshot_mirrored_step") == -1
    metrics.copies.record_copy(copied(1, "snapshot", 2, size=300, seconds=0.04))
    metrics.copies.record_event(mirrored("tray-01/0", 7, 6))  # of a worker that is gone
    metrics.copies.record_event(mirrored("tray-01/0", 2, 2))
    assert value(metrics, "snapshot_step") == value(metrics, "snapshot_mirrored_step") == 2
    assert value(metrics, "snapshot_bytes") == 300
    assert value(metrics, "snapshot_stall_seconds_sum") == pytest.approx(0.06)


def test_after_a_re_entry_a_step_is_a_step_and_what_is_of_the_old_layout_is_none() -> None:
    layout = Generation(3)
    metrics = Metrics("job-1", lambda: msgspec.structs.replace(WORLD, layout=layout))
    metrics.copies.record_event(mirrored("tray-00/0", 1, 4))
    metrics.copies.record_event(mirrored("tray-01/0", 2, snapshot_id(layout, Step(6))))
    assert value(metrics, "snapshot_mirrored_step") == -1
    metrics.copies.record_event(mirrored("tray-00/0", 1, snapshot_id(layout, Step(6))))
    assert value(metrics, "snapshot_mirrored_step") == 6


def test_copies_that_fail_and_snapshots_that_are_damaged_are_counted(metrics: Metrics) -> None:
    metrics.copies.record_event(mirrored("tray-00/0", 1, 4))
    metrics.copies.record_copy(copied(1, "copy", 4, "failed"))
    damaged = SnapshotDamaged(
        slot=SlotId("tray-00/0"), incarnation=Incarnation(1), generation=Generation(2), step=Step(4), where="", because="x"
    )  # fmt: skip
    metrics.copies.record_event(damaged)
    assert value(metrics, "snapshot_copies_total", outcome="made") == 1
    assert value(metrics, "snapshot_copies_total", outcome="failed") == 1
    assert value(metrics, "snapshots_damaged_total") == 1


def test_a_checkpoint_that_several_ranks_have_finished_counts_once(metrics: Metrics) -> None:
    for rank in (1, 0):
        metrics.copies.record_copy(copied(rank, "checkpoint", 9, seconds=0.5))
    metrics.copies.record_copy(copied(0, "checkpoint", 19, "passed_over"))
    metrics.copies.record_copy(copied(1, "checkpoint", 29, "failed"))
    assert value(metrics, "checkpoint_step") == 9
    assert value(metrics, "checkpoint_write_seconds_count") == 1
    for outcome in ("done", "passed_over", "failed"):
        assert value(metrics, "checkpoints_total", outcome=outcome) == 1


def test_restores_are_counted_by_where_the_state_came_from(metrics: Metrics) -> None:
    told: list[RecoveryRecord] = []
    watch = RecoveryWatch(told.append)
    for tray, address in (("tray-00", "a:1"), ("tray-01", "b:1")):
        joined = TrayJoined(tray=TrayId(tray), host=tray, slots=2, store="s:1", snapshots=address)
        watch.on_event(joined, 0.0)
    watch.on_command(ResumeGeneration(plan=WORLD, because="all are here"), 0.0, 1.0)
    watch.on_command(BreakGeneration(generation=Generation(2), workers=(), because="lost"), 2.0, 3.0)
    members = (
        member(0, "tray-00/0", 1),
        *(member(rank, f"tray-01/{rank}", rank + 5, fresh=True) for rank in (1, 2, 3)),
    )
    after = GenerationPlan(
        generation=Generation(2),
        world_size=4,
        members=members,
        store="s:1",
        layout=Generation(0),
        full=4,
        committed=Position(6),
        rollback=Step(4),
        restores=(
            Restore(rank=Rank(1), snapshot="b:1/tray-01/0/2"),
            Restore(rank=Rank(2), snapshot="a:1/tray-01/1/3"),
            Restore(rank=Rank(3), sources=(Rank(0),)),
        ),
    )
    watch.on_command(ResumeGeneration(plan=after, because="swap"), 2.0, 4.0)
    watch.finish()
    metrics.record_recovery(told[-1])
    metrics.copies.record_copy(copied(0, "resume", 3))
    for source in ("own_snapshot", "its_tray", "other_tray", "live_peer", "disk"):
        assert value(metrics, "restores_total", source=source) == 1, source


def test_the_page_lists_every_metric(metrics: Metrics) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "metrics.md").read_text()
    named = {name.removesuffix("_total") for name in re.findall(r"`(rackrun_\w+)", page)}
    assert named == {family.name for family in metrics.registry.collect()}


def test_the_time_of_a_hold_is_no_time_of_a_recovery(metrics: Metrics) -> None:
    held = RecoveryRecord(generation=2, kind="swap", because="lost", fault_ms=1_000.0, held_ms=3_600_000.0)
    held.resumed_ms = 3_603_000.0
    metrics.record_recovery(held)
    assert value(metrics, "recovery_seconds_sum") == 2.0
    assert value(metrics, "held_seconds_total") == 3_600.0
