"""Faults of GPUs, told by a driver that a real watch asks."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rackrun.chaos.base.errors import PlanError, Unsupported
from rackrun.chaos.faults.fault_types import Subjects
from rackrun.chaos.faults.hardware import gpu_failure, xid_error
from rackrun.chaos.faults.hardware.gpu_failure import GpuFails
from rackrun.chaos.faults.hardware.xid_error import Xid
from rackrun.chaos.faults.processes.crash_at_point import CrashAt
from rackrun.chaos.faults.table.fault_table import Fault
from rackrun.chaos.faults.targets import One
from rackrun.chaos.injectors.doctor import check_plan
from rackrun.chaos.injectors.resources import gpu_errors
from rackrun.chaos.injectors.resources.gpu_errors import Reported, driver_for
from rackrun.chaos.plan.definition import Inject, Plan
from rackrun.chaos.testbed.fake_nvml.fake_driver import FakeRack, build
from rackrun.chaos.testbed.machine.undo_log import UndoLog, heal_all
from rackrun.errors import UsageError
from rackrun.topology.gpu_driver.nvml_watch import NvmlWatch
from rackrun.topology.gpu_driver.readings import TrayReading
from rackrun.topology.model.rack_file import read_rack_file

WAIT_S = 60.0
RACK = Path(__file__).resolve().parents[3] / "examples" / "racks" / "gb200-nvl72.yaml"


@pytest.fixture
def rack(tmp_path: Path) -> Iterator[FakeRack]:
    made = FakeRack.create(tmp_path / "driver.state", read_rack_file(RACK))
    yield made
    made.close()


@pytest.fixture
def undo(tmp_path: Path) -> UndoLog:
    return UndoLog(tmp_path / "undo")


def plan(fault: Fault, kind: Subjects = Subjects.RANK) -> Plan:
    return Plan(plan=Inject(fault=fault, target=One(kind)))


def test_it_has_taken_effect_when_the_watch_has_seen_it_and_the_driver_forgets_it_again(
    rack: FakeRack, undo: UndoLog, tmp_path: Path
) -> None:
    name = next(iter(read_rack_file(RACK).trays))
    with NvmlWatch(period_ms=10, env=rack.environment(build(tmp_path / "lib"), name)) as watch:
        xids: list[int] = []
        actions: dict[int, int | None] = {}

        def until(done: Callable[[], bool]) -> None:
            deadline = time.monotonic() + WAIT_S
            while not done():
                assert time.monotonic() < deadline
                said = watch.next(0.05)
                if isinstance(said, TrayReading):
                    actions.update((gpu.index, gpu.recovery_action) for gpu in said.gpus)
                elif said is not None:
                    xids.append(said.xid)  # type: ignore[union-attr]

        until(lambda: bool(actions))
        reported = Reported(rack, [f"{name}/2"], xid_error.report_of(Xid(code=119)), undo)
        until(lambda: reported.outcome() is not None)
        outcome = reported.outcome()
        assert outcome is not None
        assert outcome.took
        until(lambda: xids == [119] and actions[2] == 1)
        reported.take_back()
        until(lambda: actions[2] == 0)
    assert not list(undo.folder.iterdir())


def test_what_the_driver_says_is_taken_back_also_by_another_process(rack: FakeRack, undo: UndoLog) -> None:
    name = next(iter(read_rack_file(RACK).trays))
    reported = Reported(rack, [f"{name}/0"], gpu_failure.report_of(GpuFails(says="link")), undo)
    assert reported.outcome() is None, "nobody has asked yet"
    assert rack.tray(name).gpu[0].link_state[11] == 0
    heal_all(undo.folder)
    assert rack.tray(name).gpu[0].link_state[11] == 1
    assert rack.tray(name).gpu[0].link_state[10] == 1


@pytest.mark.parametrize(
    ("code", "says"), [(79, {"error": 15}), (119, {"recovery_action": 1}), (31, {}), (63, {}), (9999, {})]
)
def test_with_an_xid_that_asks_for_a_reset_the_driver_asks_for_it(code: int, says: object) -> None:
    assert xid_error.report_of(Xid(code=code)).says == says


def test_a_gpu_fault_needs_a_rack_file(tmp_path: Path) -> None:
    assert driver_for(plan(CrashAt(point="gate.before")), ["train.py"], tmp_path) is None
    with pytest.raises(Unsupported, match="--rack FILE"):
        driver_for(plan(Xid(code=79)), ["--nproc-per-node", "2", "train.py"], None)
    with pytest.raises(UsageError, match=r"no\.yaml"):
        driver_for(plan(Xid(code=79)), ["--rack=no.yaml", "train.py"], None)
    assert driver_for(plan(GpuFails(says="row")), ["--rack", str(RACK), "train.py"], None) is None, "it can be"


def test_a_machine_with_a_driver_of_its_own_or_without_a_compiler_is_told_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_errors, "_REAL", (tmp_path,))
    with pytest.raises(Unsupported, match="real driver"):
        check_plan(plan(Xid(code=79)))
    monkeypatch.setattr(gpu_errors, "_REAL", ())
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(Unsupported, match="gcc"):
        check_plan(plan(Xid(code=79)))


def test_a_process_crashes_only_where_it_comes() -> None:
    check_plan(plan(CrashAt(point="agent_pass.before"), Subjects.AGENT))
    check_plan(plan(CrashAt(point="coordinator_persist.after"), Subjects.COORDINATOR))
    with pytest.raises(PlanError, match="a rank does not come to agent_pass"):
        check_plan(plan(CrashAt(point="agent_pass.before"), Subjects.RANK))
    with pytest.raises(PlanError, match="a coordinator does not come to gate"):
        check_plan(plan(CrashAt(point="gate.before"), Subjects.COORDINATOR))
