"""Each fault of storage, memory, corruption, clock and data, done to a process, a file or memory that is really there."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from rackrun.chaos.faults.data.flip_bit import FlipBit
from rackrun.chaos.faults.data.poison_batch import PoisonBatch
from rackrun.chaos.faults.data.step_clock import StepClock
from rackrun.chaos.faults.fault_types import Subjects
from rackrun.chaos.faults.processes.exhaust_memory import ExhaustMemory
from rackrun.chaos.faults.storage.disk_failure import CALLS, DiskFails
from rackrun.chaos.faults.storage.disk_full import DiskFull
from rackrun.chaos.faults.table.fault_table import Fault
from rackrun.chaos.faults.targets import One
from rackrun.chaos.injectors import refusal
from rackrun.chaos.injectors.common.injection import Injected, Missed, StrikeOutcome
from rackrun.chaos.injectors.resources.bit_flips import checkpoint_bit, snapshot_bit
from rackrun.chaos.injectors.resources.clock_jumps import Stepped
from rackrun.chaos.injectors.resources.memory_exhaustion import Confined, memory_here
from rackrun.chaos.injectors.resources.storage_faults import Failing, Filled
from rackrun.chaos.inprocess.data_faults import Poison
from rackrun.chaos.inprocess.file_faults import BadFiles
from rackrun.chaos.inprocess.inprocess_faults import FaultOrder, _Hooks
from rackrun.chaos.plan.definition import Inject, Plan
from rackrun.chaos.runs.run_plan import run_plan
from rackrun.chaos.testbed.job_under_test import checkpoints_in
from rackrun.chaos.testbed.machine import private_filesystem
from rackrun.chaos.testbed.machine.fake_clock import ClockPages, can_move, move
from rackrun.chaos.testbed.machine.leaked_resources import can_be_private
from rackrun.chaos.testbed.machine.processes import Process
from rackrun.chaos.testbed.machine.undo_log import UndoLog, Unmount, heal_all
from rackrun.checkpoint.arena.arena import Arena
from rackrun.checkpoint.base.errors import IntegrityError
from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.checkpoint.durable.storage.files import Files
from rackrun.errors import UsageError
from rackrun.protocol.boot import SNAPSHOT_JOB
from tests.checkpoint.storage import JOB, save, store_at
from tests.launcher.waiting import wait_until

WAIT_S = 60.0
NOBODY = 4_194_305
"""Above the largest process id that Linux gives."""
ANSWERS = "import sys\nfor line in sys.stdin:\n    print(eval(line), flush=True)\n"


class Answering:
    """A Python that evaluates a line at a time."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        words = [*command, sys.executable, "-c", ANSWERS]
        self.popen = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **env}
        )
        self.ask("0")  # it is itself by then, and no longer who starts it
        found = Process.of(self.popen.pid)
        assert found is not None
        self.process = found

    def ask(self, question: str) -> Any:
        self.tell(question)
        assert self.popen.stdout is not None
        return eval(self.popen.stdout.readline())

    def tell(self, question: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(question + "\n")
        self.popen.stdin.flush()


@pytest.fixture
def answering() -> Iterator[Callable[..., Answering]]:
    started = []

    def start(command: list[str] | None = None, env: dict[str, str] | None = None) -> Answering:
        started.append(Answering(command or [], env or {}))
        return started[-1]

    yield start
    for one in started:
        one.popen.kill()
        one.popen.communicate()


@pytest.fixture
def undo(tmp_path: Path) -> UndoLog:
    return UndoLog(tmp_path / "undo")


@pytest.fixture
def inside(tmp_path: Path) -> Path:
    for name in ("orders", "done"):
        (tmp_path / "inside" / name).mkdir(parents=True)
    return tmp_path / "inside"


def own_process() -> Process:
    own = Process.of(os.getpid())
    assert own is not None
    return own


def outcome_of(injected: Injected) -> StrikeOutcome:
    deadline = time.monotonic() + WAIT_S
    while (outcome := injected.outcome()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return outcome


# -- storage
@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    if not can_be_private():
        pytest.skip("nothing can be mounted here")
    undo = UndoLog(tmp_path / "mounted")
    undo.record(Unmount(str(tmp_path / "disk")))
    private_filesystem.mount(tmp_path / "disk")
    yield tmp_path / "disk"
    heal_all(undo.folder)
    assert not (tmp_path / "disk").exists()


def test_a_full_disk_takes_nothing_more_until_it_is_taken_back(disk: Path, undo: UndoLog) -> None:
    (disk / "x").write_bytes(bytes(100_000))
    full = Filled(disk, undo)
    assert outcome_of(full).took
    assert private_filesystem.sizes(disk)[0] == private_filesystem.sizes(disk)[1]
    with pytest.raises(OSError, match="No space left"):
        (disk / "y").write_bytes(bytes(100_000))
    full.take_back()
    (disk / "y").write_bytes(bytes(100_000))
    assert not list(undo.folder.iterdir())


def test_a_disk_is_freed_for_an_injector_that_has_died(disk: Path, undo: UndoLog) -> None:
    before = private_filesystem.sizes(disk)[0]
    Filled(disk, undo)
    assert private_filesystem.sizes(disk)[0] < before
    assert "SetSize" in heal_all(undo.folder)[0]
    assert private_filesystem.sizes(disk)[0] == before


def failing(fault: DiskFails, inside: Path, undo: UndoLog) -> tuple[Failing, BadFiles]:
    return Failing(fault, 0, inside, undo), BadFiles(_Hooks(inside), inside)


@pytest.mark.parametrize("call", CALLS)
def test_a_call_fails_until_it_is_taken_back_and_no_other_does(call: Any, inside: Path, undo: UndoLog) -> None:
    order, bad = failing(DiskFails(call=call, error="EIO"), inside, undo)
    for other in CALLS:
        if other != call:
            assert bad.strike(other, lambda *_: "done", Files()) == "done"
    assert order.outcome() is None
    with pytest.raises(OSError, match="chaos: Input/output error") as raised:
        bad.strike(call, lambda *_: "done", Files())
    assert raised.value.errno == errno.EIO
    assert outcome_of(order).took
    order.take_back()
    assert bad.strike(call, lambda *_: "done", Files()) == "done"
    assert not list(undo.folder.iterdir())


def test_half_of_a_torn_shard_gets_there_and_nobody_is_told(tmp_path: Path, inside: Path, undo: UndoLog) -> None:
    order, bad = failing(DiskFails(call="write", error="torn"), inside, undo)
    path = tmp_path / ".rank-0.safetensors.part"
    with path.open("wb") as file:
        assert bad.strike("write", Files.write, Files(), file.fileno(), memoryview(b"\1" * 10)) == 10
    assert path.read_bytes() == b"\1" * 5 + bytes(5)
    assert outcome_of(order).took


def test_a_slow_call_is_done_when_its_time_is_over_or_it_is_taken_back(inside: Path, undo: UndoLog) -> None:
    order, bad = failing(DiskFails(call="fsync", error="slow", slow_s=0.0), inside, undo)
    assert bad.strike("fsync", lambda *_: "done", Files()) == "done"
    assert outcome_of(order).took
    still, bad = failing(DiskFails(call="fsync", error="slow", slow_s=1e6), inside, undo)
    done: list[object] = []
    caller = threading.Thread(target=lambda: done.append(bad.strike("fsync", lambda *_: "done", Files())))
    caller.start()
    still.take_back()
    caller.join(WAIT_S)
    assert done == ["done"]


# -- memory
@pytest.mark.skipif(memory_here(os.getpid()) is None, reason="no control group can limit memory here")
def test_who_has_no_memory_left_is_killed_by_the_kernel(answering: Callable[..., Answering], undo: UndoLog) -> None:
    there = answering()
    above = memory_here(there.process.pid)
    assert above is not None

    def order() -> Any:
        there.tell("[b'1' * (1 << 20) for _ in range(4096)]")
        return SimpleNamespace(outcome=lambda: StrikeOutcome(True, "allocates"))

    assert outcome_of(Confined(there.process, order, undo, above)).took
    assert there.popen.wait() == -signal.SIGKILL
    assert not list(undo.folder.iterdir())
    assert not list(above.glob("rackrun-chaos-*"))


# -- corruption
def test_a_bit_of_the_newest_checkpoint_is_flipped(tmp_path: Path) -> None:
    for number in (1, 2):
        assert save(store_at(tmp_path), number)
    detail = checkpoint_bit(tmp_path, random.Random(3))
    assert "in the checkpoint of step" in detail
    store = DurableStore(tmp_path, JOB)
    assert store.verify(1).ok
    assert not store.verify(2).ok


def test_without_a_checkpoint_there_is_nothing_to_flip(tmp_path: Path) -> None:
    assert checkpoint_bit(tmp_path, random.Random(3)) == ""


def test_a_bit_of_a_sealed_snapshot_is_flipped_through_its_agents_memory() -> None:
    fds = [os.memfd_create(f"rackrun-snapshot-tray-00/1-7-{which}") for which in "ab"]
    try:
        assert snapshot_bit(own_process(), "tray-00/1", 7, random.Random(3)) == "", "none is sealed"
        assert snapshot_bit(Process(NOBODY, 1), "tray-00/1", 7, random.Random(3)) == "", "its agent is gone"
        with Arena.create(fds[1], job=SNAPSHOT_JOB, rank=4, fencing_token=1, slots=1, payload_bytes=4096) as arena:
            assert snapshot_bit(own_process(), "tray-00/1", 7, random.Random(3)) == "", "it has no slot that is sealed"
            writer = arena.begin(12, 12)
            np.frombuffer(writer.payload, dtype=np.uint8)[:] = 5
            writer.seal(3000, "layout")
            arena.reader(12, owner=4).verify()
            assert snapshot_bit(own_process(), "tray-00/1", 8, random.Random(3)) == "", "another's"
            assert "of the snapshot of step 12, of tray-00/1" in snapshot_bit(
                own_process(), "tray-00/1", 7, random.Random(3)
            )
            with pytest.raises(IntegrityError):
                arena.reader(12, owner=4).verify()
    finally:
        for fd in fds:
            os.close(fd)


# -- clocks
@pytest.mark.skipif(bool(can_move()), reason="wall clocks of single processes cannot be moved here")
def test_a_wall_clock_jumps_and_no_other_does(
    answering: Callable[..., Answering], tmp_path: Path, undo: UndoLog
) -> None:
    pages = ClockPages(tmp_path / "clocks")
    here, beside = answering(env=pages.env), answering(env=pages.env)
    clocks = "[__import__('time').time(), __import__('time').monotonic()]"
    before = here.ask(clocks)
    stepped = Stepped([here.process], -1e6, pages, undo)
    assert outcome_of(stepped).took
    wall, monotonic = here.ask(clocks)
    assert wall < before[0] - 5e5
    assert monotonic >= before[1]
    assert here.ask("__import__('datetime').datetime.now().timestamp()") < before[0] - 5e5
    assert beside.ask(clocks)[0] >= before[0]
    stepped.take_back()
    assert here.ask(clocks)[0] >= before[0]
    assert not list(undo.folder.iterdir())


@pytest.mark.skipif(bool(can_move()), reason="wall clocks of single processes cannot be moved here")
def test_a_fork_has_a_clock_of_its_own(answering: Callable[..., Answering], tmp_path: Path) -> None:
    pages = ClockPages(tmp_path / "clocks")
    parent = answering(env=pages.env)
    child = parent.ask("(lambda pid: pid or [input(), __import__('os')._exit(0)])(__import__('os').fork())")
    try:
        found = Process.of(child)
        assert found is not None
        wait_until(partial(pages.mapped_by, found), 10)  # it answers before its child has gone on
        assert pages.path(found) != pages.path(parent.process)
        move(pages.path(parent.process), 1e6)
        assert pages.path(found).read_bytes() == bytes(8)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_process_without_such_a_clock_is_not_struck(
    answering: Callable[..., Answering], tmp_path: Path, undo: UndoLog
) -> None:
    if can_move():
        pytest.skip("wall clocks of single processes cannot be moved here")
    with pytest.raises(Missed):
        Stepped([answering().process], 1.0, ClockPages(tmp_path / "clocks"), undo)
    assert not list(undo.folder.iterdir())


# -- data
@pytest.mark.parametrize("how", ["raises", "nan"])
def test_one_sample_is_poison_for_everybody_from_the_order_on(how: Any, inside: Path) -> None:
    mine, others = Poison(_Hooks(inside), inside), Poison(_Hooks(inside), inside)
    mine.choose(3, [4, 5])
    assert mine.among([4, 5]) is None
    orders = inside / "orders" / str(os.getpid())
    orders.mkdir()
    (orders / "0.json").write_bytes(msgspec.json.encode(FaultOrder(0, PoisonBatch(how=how), 7)))
    mine.choose(4, [6, 7])
    found = others.among([7, 6, 8])
    assert found is not None
    assert found[0] in (6, 7)
    assert found[1] == how
    mine.choose(5, [8, 9])
    assert others.among([8, 9]) is None


# -- what cannot be
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (FlipBit(of="snapshot"), Subjects.STORAGE),
        (FlipBit(of="checkpoint"), Subjects.RANK),
        (ExhaustMemory(), Subjects.SPARE),
        (DiskFails(call="read", error="ENOSPC"), Subjects.STORAGE),
        (DiskFails(call="fsync", error="torn"), Subjects.STORAGE),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_remedy(fault: Fault, kind: Subjects) -> None:
    refused = refusal(fault, kind)
    assert refused is not None
    assert all(refused)


@pytest.mark.parametrize(
    ("fault", "kind", "ability"),
    [
        (DiskFull(), Subjects.STORAGE, ("can_be_private", False)),
        (StepClock(by_s=1.0), Subjects.AGENT, ("can_move", "no compiler")),
        (ExhaustMemory(), Subjects.RANK, ("memory_here", None)),
    ],
)
def test_what_this_machine_cannot_do_is_refused_with_a_remedy(
    fault: Fault, kind: Subjects, ability: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"rackrun.chaos.injectors.machine_abilities.{ability[0]}", lambda *_: ability[1])
    refused = refusal(fault, kind)
    assert refused is not None
    assert all(refused)


def test_storage_is_struck_in_jobs_that_write_checkpoints_only(tmp_path: Path) -> None:
    plan = Plan(plan=Inject(fault=DiskFails(), target=One(Subjects.STORAGE)))
    with pytest.raises(UsageError, match="writes none"):
        run_plan(plan, ["--spares", "1", "train.py", "--checkpoint-dir", "x"], out=tmp_path / "out")
    assert checkpoints_in(["--checkpoint_dir=/a/b", "train.py"]) == Path("/a/b")
