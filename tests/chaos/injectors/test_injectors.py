"""Each fault, done to a process that is really there."""

from __future__ import annotations

import errno
import importlib
import operator
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rackrun.chaos.base.errors import PlanError, Unsupported
from rackrun.chaos.faults.crash_points import FUNCTIONS
from rackrun.chaos.faults.data.flip_bit import FlipBit
from rackrun.chaos.faults.fault_types import Subjects, name_of
from rackrun.chaos.faults.hangs.delay_collective import DelayCollective
from rackrun.chaos.faults.hangs.hold_gil import HoldGil
from rackrun.chaos.faults.hangs.slow_down import Slow
from rackrun.chaos.faults.processes.crash_at_point import CrashAt
from rackrun.chaos.faults.processes.kill import Kill
from rackrun.chaos.faults.processes.raise_exception import Raise
from rackrun.chaos.faults.table.fault_table import Fault, all_faults
from rackrun.chaos.faults.targets import One
from rackrun.chaos.injectors.common.injection import Injected, StrikeOutcome
from rackrun.chaos.injectors.common.inprocess_orders import Ordered
from rackrun.chaos.injectors.doctor import check_plan, examine
from rackrun.chaos.injectors.processes.cpu_slowdown import ByQuota, ByTurns, quota_here
from rackrun.chaos.injectors.processes.signals import Killed, Paused, Preempted
from rackrun.chaos.injectors.resources.descriptor_limits import WithoutDescriptors
from rackrun.chaos.inprocess.inprocess_faults import _Hooks
from rackrun.chaos.plan.definition import AtPoint, Inject, Plan
from rackrun.chaos.testbed.machine.processes import Process
from rackrun.chaos.testbed.machine.undo_log import UndoLog, heal_all

WAIT_S = 60.0


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    """``start(*command)``: a process."""
    started = []

    def one(*command: str) -> Process:
        started.append(subprocess.Popen(command or ("sleep", "600")))
        found = Process.of(started[-1].pid)
        assert found is not None
        return found

    yield one
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def undo(tmp_path: Path) -> UndoLog:
    return UndoLog(tmp_path / "undo")


def outcome_of(injected: Injected) -> StrikeOutcome:
    deadline = time.monotonic() + WAIT_S
    while (outcome := injected.outcome()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return outcome


def test_a_kill_has_taken_effect_when_all_are_gone(start: Callable[..., Process]) -> None:
    processes = [start(), start()]
    assert outcome_of(Killed(processes, signal.SIGKILL)).took
    assert not any(process.state for process in processes)


def test_who_was_gone_already_was_not_killed(start: Callable[..., Process]) -> None:
    process = start()
    outcome_of(Killed([process], signal.SIGKILL))
    assert outcome_of(Killed([process], signal.SIGKILL)) == StrikeOutcome(False, "gone already")


def test_a_pause_has_taken_effect_when_the_kernel_says_so_and_ends_when_it_is_taken_back(
    start: Callable[..., Process], undo: UndoLog
) -> None:
    process = start()
    paused = Paused([process], undo)
    assert outcome_of(paused).took
    assert process.state == "T"
    paused.take_back()
    assert process.state not in ("T", "")
    assert not list(undo.folder.iterdir())


OPENS = "import sys\nfor _ in sys.stdin:\n    try: open('/dev/null').close(); print('opened', flush=True)\n    except OSError as error: print(error.errno, flush=True)"


@pytest.mark.parametrize("by_hand", [False, True])
def test_who_has_no_descriptor_left_can_open_nothing_until_it_is_taken_back(by_hand: bool, undo: UndoLog) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OPENS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None

        def tries() -> str:
            print(file=child.stdin, flush=True)
            return child.stdout.readline().strip()  # type: ignore[union-attr]

        assert tries() == "opened"
        process = Process.of(child.pid)
        assert process is not None
        strike = WithoutDescriptors([process], undo)
        assert strike.outcome().took
        assert tries() == str(errno.EMFILE)
        if by_hand:
            heal_all(undo.folder)
        strike.take_back()
        assert tries() == "opened"
        child.stdin.close()
    assert not WithoutDescriptors([process], undo).outcome().took


def test_who_leaves_within_the_notice_is_not_killed(start: Callable[..., Process]) -> None:
    assert "left by itself" in outcome_of(Preempted([start()], 600.0)).detail


def test_who_does_not_leave_is_killed_with_its_tray(start: Callable[..., Process]) -> None:
    deaf = start("sh", "-c", "trap '' TERM; echo > /dev/null; while :; do sleep 600; done")
    worker = start()
    while not _ignores_term(deaf.pid):
        time.sleep(0.005)
    child = next(Process.of(int(pid)) for pid in _children(deaf.pid))
    assert child is not None
    outcome = outcome_of(Preempted([deaf, worker, child], 0.0))
    assert outcome.took
    assert "killed when the notice was over" in outcome.detail


def test_a_slow_one_stops_in_turns_and_runs_again_afterwards(start: Callable[..., Process], undo: UndoLog) -> None:
    process = start()
    slow = ByTurns([process], 0.3, undo)
    assert outcome_of(slow).took
    slow.take_back()
    assert process.state not in ("T", "")
    assert not list(undo.folder.iterdir())


def test_a_quota_holds_who_is_slow_and_leaves_no_group_behind(start: Callable[..., Process], undo: UndoLog) -> None:
    process = start()
    above = quota_here(process.pid)
    if above is None:
        pytest.skip("no control group with a quota can be made here")
    before = Path(f"/proc/{process.pid}/cgroup").read_text()
    slow = ByQuota([process], 0.3, undo, above)
    assert outcome_of(slow).took
    assert "rackrun-chaos-" in Path(f"/proc/{process.pid}/cgroup").read_text()
    slow.take_back()
    assert Path(f"/proc/{process.pid}/cgroup").read_text() == before
    assert not list(above.glob("rackrun-chaos-*")) or process.state


# -- inside a worker: this process, and what a hook sees of its step
@pytest.fixture
def inside(tmp_path: Path) -> Path:
    for name in ("orders", "done", "points", "held"):
        (tmp_path / "inside" / name).mkdir(parents=True)
    return tmp_path / "inside"


def ordered(fault: Any, inside: Path, undo: UndoLog, process: Process | None = None) -> Ordered:
    own = process or Process.of(os.getpid())
    assert own is not None
    return Ordered([own], 0, fault, 7, inside, undo)


def in_step(module: torch.nn.Module) -> Any:
    optimizer = torch.optim.SGD(module.parameters())
    state = SimpleNamespace(modules={"model": module}, optimizers={"optimizer": optimizer})
    return SimpleNamespace(step_in_hand=SimpleNamespace(_at=SimpleNamespace(step=4)), _state=state)


def test_an_order_is_carried_out_once_and_confirmed_by_who_does_it(inside: Path, undo: UndoLog) -> None:
    hooks, units = _Hooks(inside), in_step(torch.nn.Linear(2, 2))
    order = ordered(Raise(error="ValueError"), inside, undo)
    assert order.outcome() is None
    before_s = time.monotonic()
    with pytest.raises(ValueError, match="chaos: raised in step 4"):
        hooks.in_step(units)
    outcome = order.outcome()
    assert outcome is not None
    assert outcome[:2] == (True, "ValueError in step 4")
    assert outcome.struck_s is not None
    assert before_s <= outcome.struck_s <= time.monotonic()
    hooks.in_step(units)
    assert not list(undo.folder.iterdir())


@pytest.mark.parametrize("of", ["parameters", "gradients"])
def test_one_bit_is_flipped(of: Any, inside: Path, undo: UndoLog) -> None:
    hooks, module = _Hooks(inside), torch.nn.Linear(3, 2)
    module(torch.ones(3)).sum().backward()
    tensors = [p if of == "parameters" else p.grad for p in module.parameters()]
    before = [t.detach().clone().view(torch.int32) for t in tensors if t is not None]
    order = ordered(FlipBit(of=of), inside, undo)
    hooks.in_step(in_step(module))
    hooks.before_update(in_step(module))
    after = [t.detach().view(torch.int32) for t in tensors if t is not None]
    changed = [int(x) & 0xFFFFFFFF for a, b in zip(before, after, strict=True) for x in (a ^ b).flatten()]
    assert sum(x.bit_count() for x in changed) == 1
    assert outcome_of(order).took


def test_a_collective_is_late_and_the_gil_is_held(inside: Path, undo: UndoLog) -> None:
    hooks = _Hooks(inside)
    late = ordered(DelayCollective(for_s=0.0), inside, undo)
    hooks.in_collective()
    assert outcome_of(late).took
    held = ordered(HoldGil(for_s=0.001), inside, undo)
    hooks.in_step(in_step(torch.nn.Linear(1, 1)))
    assert outcome_of(held).took


def test_visits_of_a_point_are_counted_over_all_processes(inside: Path) -> None:
    for hooks in (_Hooks(inside), _Hooks(inside)):
        hooks.at_point("gate.before")
    assert (inside / "points" / "gate.before").stat().st_size == 2


@pytest.mark.parametrize("path", FUNCTIONS.values())
def test_every_point_is_beside_a_function_that_there_is(path: str) -> None:
    module, _, name = path.partition(":")
    assert callable(operator.attrgetter(name)(importlib.import_module(f"rackrun.{module}")))


def test_who_dies_before_it_comes_to_it_has_not_been_struck(
    start: Callable[..., Process], inside: Path, undo: UndoLog
) -> None:
    process = start()
    order = ordered(CrashAt(point="gate.before"), inside, undo, process)
    assert order.outcome() is None
    outcome_of(Killed([process], signal.SIGKILL))
    assert not outcome_of(order).took
    assert not list(undo.folder.iterdir())


# -- what cannot be
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (HoldGil(), Subjects.SPARE),
        (Slow(share=1.5), Subjects.RANK),
    ],
)
def test_what_a_real_job_cannot_have_is_refused_with_a_remedy(fault: Fault, kind: Subjects) -> None:
    with pytest.raises(Unsupported) as refused:
        check_plan(Plan(plan=Inject(fault=fault, target=One(kind))))
    assert refused.value.remedy


def test_a_point_that_there_is_not_is_refused() -> None:
    with pytest.raises(PlanError, match=r"no point 'nowhere'.*gate\.before"):
        check_plan(Plan(plan=Inject(fault=CrashAt(point="nowhere"), target=One(Subjects.RANK))))
    with pytest.raises(PlanError, match="no point"):
        check_plan(Plan(plan=Inject(fault=Kill(), target=One(Subjects.RANK), when=AtPoint(point="nowhere"))))


def test_the_doctor_speaks_of_every_fault_once_and_gives_a_remedy_for_what_cannot_be() -> None:
    found = examine()
    assert [one.fault for one in found] == [name_of(kind) for kind in all_faults()]
    assert all(one.how and (one.can or one.remedy) for one in found)
    assert {one.fault for one in found if one.can} >= {"kill", "pause", "slow", "raise"}


def _ignores_term(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = int(next(line for line in status.splitlines() if line.startswith("SigIgn")).split()[1], 16)
    return bool(mask & 1 << (signal.SIGTERM - 1)) and bool(_children(pid))


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
