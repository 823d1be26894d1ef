"""`CheckpointManager` in one process: what is saved is what comes back, and nothing that goes wrong stops training."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from rackrun.checkpoint import CheckpointManager, MemoryTier
from rackrun.checkpoint.base.errors import CheckpointError, LayoutMismatch, MemoryPlanError, NoUsableCheckpoint
from rackrun.checkpoint.durable.storage.files import Files
from rackrun.checkpoint.image.host_copies import HostCopies


class Training:
    """A small model, its optimizer, its scheduler and its place in the run."""

    def __init__(self, seed: int = 0, width: int = 8) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.progress: dict[str, Any] = {"step": 0, "seen": []}

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optim": self.optimizer, "schedule": self.scheduler, "progress": self.progress}

    def step(self) -> None:
        at = self.progress["step"]
        data = torch.randn(6, 4, generator=torch.Generator().manual_seed(at))
        self.optimizer.zero_grad()
        self.model(data).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.progress["step"] = at + 1
        self.progress["seen"].append(at)

    def bits(self) -> list[Any]:
        optimizer = self.optimizer.state_dict()
        tensors = [*self.model.state_dict().values()]
        tensors += [value for state in optimizer["state"].values() for value in state.values()]
        plain = [optimizer["param_groups"], self.scheduler.state_dict(), self.progress]
        return [tensor.numpy().tobytes() for tensor in tensors] + [repr(plain)]


@pytest.fixture
def shm() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="rackrun-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def manager(tmp_path: Path, shm: Path) -> Iterator[Callable[..., CheckpointManager]]:
    """A manager as a process makes one; ``.crash()`` ends it as an exception would."""
    made: list[CheckpointManager] = []

    def make(**options: Any) -> CheckpointManager:
        options.setdefault("memory", MemoryTier(shm))
        made.append(CheckpointManager(options.pop("directory", tmp_path / "checkpoints"), **options))
        return made[-1]

    yield make
    for one in made:
        one.__exit__(RuntimeError, None, None)


def crash(manager: CheckpointManager) -> None:
    manager.__exit__(RuntimeError, None, None)


def trained(manager: CheckpointManager, steps: int, training: Training | None = None) -> Training:
    """Prepared, restored, and trained to ``steps`` with a save after each."""
    training = training or Training()
    manager.prepare(training.state)
    manager.restore()
    while training.progress["step"] < steps:
        training.step()
        manager.save(training.progress["step"])
    return training


def arenas(shm: Path) -> list[Path]:
    return sorted(shm.glob("rackrun-*/*/*.arena"))


# -- what is saved is what comes back
def test_a_job_that_ends_goes_on_from_memory_bit_for_bit(manager: Callable[..., CheckpointManager]) -> None:
    whole = Training()
    for _ in range(9):
        whole.step()
    first = manager()
    trained(first, 5)
    first.wait_until_finished()
    crash(first)

    second, training = manager(), Training(seed=1)
    second.prepare(training.state)
    report = second.restore()
    assert report is not None
    assert (report.step, report.world_size, report.tiers) == (5, 1, {0: "own_tray"})
    assert report.bytes > 0
    for _ in range(4):
        training.step()
    assert training.bits() == whole.bits()


def test_without_memory_it_goes_on_from_the_directory(manager: Callable[..., CheckpointManager], shm: Path) -> None:
    first = manager(memory=None, durable_every=2)
    trained(first, 4)
    first.wait_until_finished()
    assert first.counters.durable + first.counters.durable_passed_over == 2
    crash(first)
    assert arenas(shm) == []
    second, training = manager(memory=None), Training(seed=1)
    second.prepare(training.state)
    report = second.restore()
    assert report is not None
    assert report.tiers == {0: "shared"}
    whole = Training()
    for _ in range(report.step):
        whole.step()
    assert training.bits() == whole.bits()


def test_a_directory_that_cannot_be_read_is_not_taken_for_an_empty_one(
    manager: Callable[..., CheckpointManager], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = manager(memory=None, durable_every=1)
    trained(first, 2)
    first.wait_until_finished()
    first.close()

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "broken")

    for call in ("pread", "listdir"):
        with monkeypatch.context() as patched:
            patched.setattr(Files, call, broken)
            second = manager(memory=None)
            second.prepare(Training().state)
            with pytest.raises(NoUsableCheckpoint, match=r"no checkpoint can be read.*broken"):
                second.restore()
            second.close()
    third = manager(memory=None)
    third.prepare(Training().state)
    report = third.restore()
    assert report is not None
    assert report.step >= 1


def test_a_fresh_directory_has_nothing_to_restore(manager: Callable[..., CheckpointManager]) -> None:
    one = manager()
    one.prepare(Training().state)
    assert one.restore() is None
    assert one.latest() is None


def test_tensors_objects_and_plain_data_come_back_as_what_they_were(manager: Callable[..., CheckpointManager]) -> None:
    class Sampler:
        def __init__(self) -> None:
            self.at, self.order = (0, 0), torch.zeros(3, dtype=torch.int64)

        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at, "order": self.order}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.at, self.order = state["at"], state["order"]

    def state() -> dict[str, Any]:
        return {"sampler": Sampler(), "ema": torch.zeros(2, 3, dtype=torch.bfloat16), "log": [], "name": "", "raw": b""}

    one, saved = manager(), state()
    saved["sampler"].at, saved["sampler"].order = (3, 4), torch.tensor([2, 0, 1])
    saved["ema"].fill_(1.5)
    saved["log"] += [1, {"two": 2.5}]
    saved |= {"name": "run", "raw": b"\0\1"}
    one.prepare(saved)
    one.save(1)
    one.wait_until_finished()
    crash(one)

    two, found = manager(), state()
    two.prepare(found)
    report = two.restore()
    assert report is not None
    assert found["sampler"].at == (3, 4)
    assert found["sampler"].order.tolist() == [2, 0, 1]
    assert torch.equal(found["ema"], saved["ema"])
    assert found["log"] == [1, {"two": 2.5}]
    assert (report.values["name"], report.values["raw"]) == ("run", b"\0\1")


def test_what_forward_may_change_is_copied_before_save_returns(manager: Callable[..., CheckpointManager]) -> None:
    one, training = manager(), Training()
    training.step()
    one.prepare(training.state)
    one.save(1)
    before = training.bits()
    training.model(torch.full((6, 4), 9.0))  # BatchNorm's buffers
    training.progress["seen"].append("later")
    one.wait_until_finished()
    crash(one)
    two, found = manager(), Training(seed=1)
    two.prepare(found.state)
    two.restore()
    assert found.bits() == before


# -- the copy and the fence
class Held(HostCopies):
    """A copy that begins when the test says so."""

    go = threading.Event()

    def copy(self, *args: Any) -> None:
        assert self.go.wait(30)
        super().copy(*args)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> type[Held]:
    Held.go = threading.Event()
    monkeypatch.setattr("rackrun.checkpoint.manager.manager.copies_from", lambda _: Held())
    return Held


def test_the_optimizer_waits_for_the_copy_by_itself(
    manager: Callable[..., CheckpointManager], held: type[Held]
) -> None:
    one, training = manager(), Training()
    training.step()
    one.prepare(training.state)
    handle = one.save(1)
    before = training.bits()
    assert not handle.staged.done()
    threading.Timer(0.05, held.go.set).start()
    training.step()
    assert handle.staged.result()
    assert handle.committed.result()
    crash(one)
    two, found = manager(), Training(seed=1)
    two.prepare(found.state)
    two.restore()
    assert found.bits() == before


def test_parameters_that_change_behind_the_fence_give_up_the_save(
    manager: Callable[..., CheckpointManager], held: type[Held], capfd: pytest.CaptureFixture[str]
) -> None:
    one, training = manager(), Training()
    one.prepare(training.state)
    handle = one.save(1)
    with torch.no_grad():
        next(training.model.parameters()).add_(1.0)
    held.go.set()
    assert handle.committed.result() is False
    assert "changed before they were copied" in handle.failure
    assert "guard()" in capfd.readouterr().err
    assert one.save(2).committed.result()
    assert one.counters.failed == 1


def test_a_guard_lets_parameters_be_changed_by_hand(
    manager: Callable[..., CheckpointManager], held: type[Held]
) -> None:
    one, training = manager(), Training()
    one.prepare(training.state)
    handle = one.save(1)
    threading.Timer(0.05, held.go.set).start()
    with one.guard(), torch.no_grad():
        next(training.model.parameters()).add_(1.0)
    assert handle.committed.result()


# -- structure
def test_state_that_grows_gets_a_new_layout_and_a_larger_arena(
    manager: Callable[..., CheckpointManager], shm: Path
) -> None:
    one = manager()
    state: dict[str, Any] = {"cache": torch.zeros(10), "log": [0]}
    one.prepare(state)
    assert one.save(1).committed.result()
    state["log"] += list(range(50_000))
    assert one.save(2).committed.result()
    one.wait_until_finished()
    crash(one)
    assert len(arenas(shm)) == 1
    found: dict[str, Any] = {"cache": torch.ones(10), "log": []}
    two = manager()
    two.prepare(found)
    two.restore()
    assert (len(found["log"]), found["cache"].sum()) == (50_001, 0)


def test_another_model_is_refused_with_the_tensors_name(manager: Callable[..., CheckpointManager]) -> None:
    one = manager()
    trained(one, 1)
    one.wait_until_finished()
    crash(one)
    two = manager()
    two.prepare(Training(width=9).state)
    with pytest.raises(LayoutMismatch, match=r"model/0\."):
        two.restore()


def test_what_is_not_plain_is_refused_before_training(manager: Callable[..., CheckpointManager]) -> None:
    with pytest.raises(LayoutMismatch, match="neither a tensor nor plain data"):
        manager().prepare({"odd": object()})


# -- damage
def test_a_flipped_byte_falls_to_the_older_checkpoint(
    manager: Callable[..., CheckpointManager], shm: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one = manager()
    trained(one, 5)
    one.wait_until_finished()
    newest = one.latest()
    assert newest is not None
    crash(one)
    flip(arenas(shm)[0], newest.number)
    two, training = manager(), Training(seed=1)
    two.prepare(training.state)
    report = two.restore()
    assert report is not None
    assert (report.step, list(report.passed_over)) == (4, [newest.number])
    assert "is not what was sealed" in capfd.readouterr().err
    trained_on = two.save(5)
    assert trained_on.committed.result()
    assert trained_on.number > newest.number


def flip(path: Path, number: int) -> None:
    """One bit in the middle of a checkpoint's payload."""
    from rackrun.checkpoint.arena.arena import Arena

    with Arena.attach(path, job="run") as arena:
        at = arena._superblock.geometry.payload_at(next(i.index for i in arena.slots() if i.number == number))
        size = len(arena.reader(number).payload)
    with path.open("r+b") as file:
        file.seek(at + size // 2)
        byte = file.read(1)[0]
        file.seek(at + size // 2)
        file.write(bytes([byte ^ 1]))


def test_a_shard_that_is_damaged_in_memory_is_read_from_disk(
    manager: Callable[..., CheckpointManager], shm: Path
) -> None:
    one = manager(durable_every=5)
    whole = trained(one, 5)
    one.wait_until_finished()
    crash(one)
    flip(arenas(shm)[0], 5)
    two, training = manager(), Training(seed=1)
    two.prepare(training.state)
    report = two.restore()
    assert report is not None
    assert (report.step, report.tiers) == (5, {0: "shared"})
    assert training.bits() == whole.bits()
    assert [two.save(step).committed.result() for step in (6, 7)] == [True, True]


def test_the_numbers_of_a_lost_arena_are_not_used_again_and_the_next_commit_is_remembered(
    manager: Callable[..., CheckpointManager], shm: Path
) -> None:
    """Its commits are still recorded, and a record is kept by its number."""
    one = manager()
    training = Training()
    one.prepare(training.state)
    for step in range(1, 8):
        training.step()
        assert one.save(step, durable=step == 1).committed.result()
        one.wait_until_finished()  # a slot that is read is not written over
    crash(one)
    arenas(shm)[0].unlink()

    two, training = manager(), Training(seed=1)
    two.prepare(training.state)
    report = two.restore()
    assert report is not None
    assert (report.number, report.tiers) == (1, {0: "shared"})
    training.step()
    handle = two.save(2)
    assert (handle.number, handle.committed.result()) == (8, True)
    crash(two)

    three = manager()
    three.prepare(Training().state)
    report = three.restore()
    assert report is not None
    assert (report.number, report.tiers) == (8, {0: "own_tray"})


@pytest.mark.parametrize("number", [2**63, 10**20 - 1])
def test_a_folder_or_a_note_with_a_number_that_none_can_have_does_not_end_all_saves(
    manager: Callable[..., CheckpointManager], tmp_path: Path, number: int
) -> None:
    first = manager(durable_every=2)
    trained(first, 2)
    first.wait_until_finished()
    crash(first)
    for name in ("gen", ".tmp-gen", "quarantined"):
        (tmp_path / "checkpoints" / "run" / f"{name}-{number}{'-1-0abc' * (name == '.tmp-gen')}").mkdir()
    second, training = manager(durable_every=2), Training()
    second.prepare(training.state)
    report = second.restore()
    assert report is not None
    assert (report.number, report.passed_over) == (2, {})
    second.save(3, durable=True)
    second.close()
    assert (second.counters.durable, second.counters.durable_failed) == (1, 0)


@pytest.mark.parametrize("number", [-1, 2**63])
def test_a_number_that_no_checkpoint_can_have_is_not_quarantined(
    manager: Callable[..., CheckpointManager], number: int
) -> None:
    one = manager()
    trained(one, 1)
    with pytest.raises(CheckpointError, match=f"no checkpoint has the number {number}"):
        one.quarantine(number, "bad")


def test_with_every_copy_damaged_it_stops_with_the_reason(manager: Callable[..., CheckpointManager], shm: Path) -> None:
    one = manager()
    trained(one, 2)
    one.wait_until_finished()
    crash(one)
    for number in (1, 2):
        flip(arenas(shm)[0], number)
    two = manager()
    two.prepare(Training().state)
    with pytest.raises(NoUsableCheckpoint, match="the shard of rank 0 has no source"):
        two.restore()


def test_a_symbolic_link_in_the_folders_place_is_refused(
    manager: Callable[..., CheckpointManager], shm: Path, tmp_path: Path
) -> None:
    (shm / f"rackrun-{os.geteuid()}").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="that nobody else can enter"):
        manager().prepare(Training().state)


# -- probation
def test_a_quarantined_checkpoint_is_never_taken_again(manager: Callable[..., CheckpointManager]) -> None:
    one = manager()
    trained(one, 3)
    one.wait_until_finished()
    one.quarantine(3, "the loss is not a number")
    crash(one)
    two = manager()
    two.prepare(Training().state)
    report = two.restore()
    assert report is not None
    assert report.step == 2
    assert "quarantined" in report.passed_over[3]


def test_a_checkpoint_that_is_restored_again_and_again_is_given_up_unless_confirmed(
    manager: Callable[..., CheckpointManager],
) -> None:
    one = manager()
    trained(one, 2)
    one.wait_until_finished()
    crash(one)
    taken = []
    for confirmed in (False, False, True, False, False, False, False):
        again = manager()
        again.prepare(Training().state)
        report = again.restore()
        assert report is not None
        taken.append(report.step)
        if confirmed:
            again.confirm(report.step + 1)
        crash(again)
    assert taken == [2, 2, 2, 2, 2, 2, 1]


def test_a_checkpoint_after_which_a_newer_one_was_committed_is_restored_as_often_as_needed(
    manager: Callable[..., CheckpointManager], shm: Path
) -> None:
    one = manager(durable_every=2)
    trained(one, 2)
    one.wait_until_finished()
    crash(one)
    for _ in range(5):  # each time the memory is lost, with what was committed there
        shutil.rmtree(shm)
        shm.mkdir()
        again, training = manager(durable_every=100), Training()
        again.prepare(training.state)
        report = again.restore()
        assert report is not None
        assert report.step == 2
        training.step()
        assert again.save(3).committed.result(timeout=60)
        again.wait_until_finished()
        crash(again)


def test_a_restore_comes_before_the_first_save_and_once(manager: Callable[..., CheckpointManager]) -> None:
    one = manager()
    with pytest.raises(CheckpointError, match="not prepared"):
        one.save(1)
    one.prepare(Training().state)
    one.save(1)
    with pytest.raises(CheckpointError, match="already"):
        one.restore()


# -- storage that fails
class Full(Files):
    def write(self, fd: int, data: memoryview) -> int:
        raise OSError(28, "No space left on device")


def test_a_full_disk_is_a_counter_and_a_line_and_training_goes_on(
    manager: Callable[..., CheckpointManager], capfd: pytest.CaptureFixture[str]
) -> None:
    one = manager(durable_every=1)
    one._store.files = Full()
    trained(one, 4)
    one.wait_until_finished()
    assert one.counters.committed == 4
    assert one.counters.durable == 0
    assert one.counters.durable_failed >= 1
    said = [line for line in capfd.readouterr().err.splitlines() if "No space left" in line]
    assert len(said) == 1
    assert "training goes on" in said[0]


def test_memory_that_is_not_there_is_refused_at_prepare(tmp_path: Path, shm: Path) -> None:
    with (
        CheckpointManager(tmp_path, memory=MemoryTier(shm, usable=1e-9)) as one,
        pytest.raises(MemoryPlanError, match="need"),
    ):
        one.prepare({"weights": torch.zeros(10_000)})


def test_the_newest_durable_checkpoints_stay_and_no_others(
    manager: Callable[..., CheckpointManager], tmp_path: Path
) -> None:
    one = manager(keep=2)
    training = Training()
    one.prepare(training.state)
    for step in range(1, 6):
        training.step()
        assert one.save(step, durable=True).durable.result()
    one.wait_until_finished()
    assert sorted(path.name for path in (tmp_path / "checkpoints" / "run").glob("gen-*")) == [
        "gen-000000000004",
        "gen-000000000005",
    ]


def test_a_copy_of_a_checkpoint_under_another_number_raises_no_numbers_and_is_not_lost(
    manager: Callable[..., CheckpointManager], tmp_path: Path, shm: Path
) -> None:
    one, training = manager(), Training()
    one.prepare(training.state)
    training.step()
    assert one.save(1, durable=True).durable.result()
    one.close()
    run = tmp_path / "checkpoints" / "run"
    for number in (3, 9999):
        shutil.copytree(run / "gen-000000000001", run / f"gen-{number:012d}")
    two, training = manager(), Training()
    two.prepare(training.state)
    report = two.restore()
    assert report is not None
    assert report.number == 1
    training.step()
    handles = [two.save(step, durable=True) for step in (2, 3)]
    assert [handle.durable.result() for handle in handles] == [True, True]
    assert [handle.number for handle in handles] == [2, 3]
    two.close()
    assert len(list(run.glob("not-gen-000000000003-*"))) == 1
    assert (run / "gen-000000009999").is_dir()
    assert not list(run.glob("quarantined-*"))


def test_a_save_waits_for_the_disk_of_no_older_one(
    manager: Callable[..., CheckpointManager], capfd: pytest.CaptureFixture[str]
) -> None:
    class Stalled(Files):
        go = threading.Event()

        def write(self, fd: int, data: memoryview) -> int:
            assert self.go.wait(30)
            return super().write(fd, data)

    one = manager(durable_every=1)
    one._store.files = Stalled()
    training = Training()
    one.prepare(training.state)
    handles = []
    for step in range(1, 7):
        training.step()
        handles.append(one.save(step))
        assert handles[-1].committed.result()
    assert not handles[0].durable.done()
    Stalled.go.set()
    one.wait_until_finished()
    assert [handle.durable.result() for handle in handles] == [True] + [False] * 5
    assert one.counters.durable_passed_over == 5
    assert capfd.readouterr().err.count("an older one is still being written") == 1


# -- who may write
def test_a_job_that_is_started_twice_fences_the_first_whose_end_takes_nothing_away(
    manager: Callable[..., CheckpointManager], shm: Path
) -> None:
    first, second = manager(), manager()
    trained(first, 2)
    first.wait_until_finished()
    training = trained(second, 4, Training(seed=1))
    second.wait_until_finished()
    late = first.save(3)
    assert late.committed.result() is False
    assert "has taken the arena" in late.failure
    first.close()
    assert len(arenas(shm)) == 1
    crash(second)
    third, found = manager(), Training(seed=2)
    third.prepare(found.state)
    report = third.restore()
    assert report is not None
    assert (report.step, report.tiers) == (4, {0: "own_tray"})
    assert found.bits() == training.bits()


# -- what stays and what goes
def test_a_clean_close_leaves_no_memory_behind(manager: Callable[..., CheckpointManager], shm: Path) -> None:
    one = manager()
    trained(one, 2)
    assert len(arenas(shm)) == 1
    assert arenas(shm)[0].parent.stat().st_mode & 0o077 == 0
    one.close()
    assert list(shm.iterdir()) == []


@pytest.mark.stories
def test_a_process_that_exits_without_close_leaves_its_arena_and_ends(tmp_path: Path, shm: Path) -> None:
    script = (
        "import sys, torch\nfrom rackrun.checkpoint import CheckpointManager, MemoryTier\n"
        "one = CheckpointManager(sys.argv[1], memory=MemoryTier(sys.argv[2]))\n"
        "one.prepare({'w': torch.arange(5)})\none.restore()\nprint(one.save(7).committed.result())\n"
    )
    ran = subprocess.run([sys.executable, "-c", script, tmp_path, shm], capture_output=True, text=True, timeout=110)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "True\n", "")
    assert len(arenas(shm)) == 1
    found = torch.zeros(5, dtype=torch.int64)
    with CheckpointManager(tmp_path, memory=MemoryTier(shm)) as one:
        one.prepare({"w": found})
        report = one.restore()
    assert report is not None
    assert (report.step, found.tolist()) == (7, [0, 1, 2, 3, 4])

    ran = subprocess.run([sys.executable, "-c", script, tmp_path, shm], capture_output=True, text=True, timeout=110)
    with CheckpointManager(tmp_path / "other", memory=MemoryTier(shm)) as other:
        other.prepare({"w": found})
        assert len(arenas(shm)) == 1, "the arena of the dead job is gone, by its pid and start time"


@pytest.mark.stories
def test_the_example_of_the_page_runs(tmp_path: Path, shm: Path) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "checkpoint.md").read_text()
    script = page.partition("```python\n")[2].partition("```")[0].replace("/dev/shm", str(shm))
    for expected in ("", "rackrun: restored step 100"):
        ran = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=110)
        assert ran.returncode == 0, ran.stderr
        assert ran.stderr.startswith(expected)


def test_the_package_imports_without_torch() -> None:
    script = "import sys, rackrun.checkpoint.arena.arena, rackrun.checkpoint.durable.durable_store\nassert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_two_hundred_saves_leave_memory_descriptors_and_shm_flat(
    manager: Callable[..., CheckpointManager], shm: Path
) -> None:
    one, me = manager(durable_every=10), psutil.Process()
    trained(one, 50)
    one.wait_until_finished()

    def used() -> tuple[int, int, int, int]:
        shared = sum(path.stat().st_size for path in arenas(shm))
        return me.num_fds(), threading.active_count(), shared, len(list(shm.rglob("*")))

    before, memory = used(), me.memory_info().rss
    training = Training()
    training.progress = one._contents.values["progress"]  # type: ignore[union-attr]
    for step in range(51, 251):
        one.save(step)
    one.wait_until_finished()
    assert used() == before
    assert me.memory_info().rss - memory < 8 * 2**20
    assert one.counters.committed == 250
