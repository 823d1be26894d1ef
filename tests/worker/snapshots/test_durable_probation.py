"""A job that ends again and again after the same checkpoint goes on from an older one, and says so; it never begins anew unasked."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rackrun.checkpoint.base.messages import SaveWarnings
from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.checkpoint.durable.probation import Probation
from rackrun.protocol.ids import Position
from rackrun.worker.loop.run import Run
from rackrun.worker.snapshots.durable_checkpoints import DurableCheckpoints, DurableOptions
from rackrun.worker.snapshots.resumption import Resumption
from rackrun.worker.state.state_manifest import Lineage
from tests.variants import in_stories
from tests.worker.harness import Ended
from tests.worker.scripts import Script, adam, ddp, fit

Train = Callable[..., Ended]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RACKRUN_CHECKPOINT_DIR", str(tmp_path))
    monkeypatch.setenv("RACKRUN_CHECKPOINT_EVERY", "2")
    return tmp_path


def trained(steps: int) -> Script:
    """No checkpoint is skipped because an older one is still being written."""

    def main(run: Run) -> None:
        model = ddp(run)

        def until_written(_: int) -> None:
            if run._units._durable is not None:
                run._units._durable.wait_written(lambda: False)

        fit(run, model, adam(model), steps=steps, between=until_written)

    return main


def doomed(run: Run) -> None:
    """It ends before its first step."""
    model = ddp(run)
    run.track(model=model, optimizer=adam(model))
    for _ in run.steps(9):
        raise ZeroDivisionError


def numbers(folder: Path) -> list[int]:
    return [info.number for info in DurableStore(folder, "run").checkpoints()]


@pytest.fixture
def small(train: Train) -> Train:
    return lambda main: train(main, ranks=2, spares=0, max_restarts=0)


def test_ten_steps_after_it_show_that_a_checkpoint_is_good(
    folder: Path, small: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(trained(5))
    monkeypatch.setenv("RACKRUN_CHECKPOINT_EVERY", "1000")
    probation = Probation(folder / "run")

    def ends_after(step: int) -> Script:
        def main(run: Run) -> None:
            model = ddp(run)
            fit(run, model, adam(model), steps=99, between=lambda number: not 1 // int(number != step))

        return main

    assert small(ends_after(12)).exit_code == 1
    assert probation.attempts() == {4: 1}
    assert small(ends_after(40)).exit_code == 1
    assert not probation.attempts()


def test_after_three_resumptions_in_vain_the_next_older_one_is_taken(folder: Path, small: Train, capfd: Any) -> None:
    small(trained(5))
    newest, older = numbers(folder)[:2]
    probation = Probation(folder / "run")
    for _ in range(2):
        probation.restored(newest)
    assert small(doomed).exit_code == 1
    assert probation.attempts() == {newest: 3}
    assert f"resumed after step {newest}" in capfd.readouterr().err

    ended = small(trained(9))
    assert min(ended.losses) == older + 1
    told = capfd.readouterr().err
    assert f"the checkpoint of step {newest} is passed over: resumed from 3 times" in told
    assert f"resumed after step {older}" in told
    reported = [(one.kind, one.outcome, one.at.step) for one in ended.copied]
    assert reported.count(("resume", "done", older)) == 2
    assert reported.count(("checkpoint", "not_used", newest)) == 1
    assert older not in probation.attempts(), "something newer was finished since"


def passed_over(folder: Path, number: int, how: str) -> None:
    """Make the checkpoint one that no restore takes."""
    probation, path = Probation(folder / "run"), folder / "run" / f"gen-{number:012d}"
    shard = path / "rank-00001-of-00002.safetensors"
    match how:
        case "in vain":
            for _ in range(3):
                probation.restored(number)
        case "quarantined":
            probation.quarantine(number, "the loss is not a number")
        case "damaged":
            data = bytearray(shard.read_bytes())
            data[-1] ^= 1
            shard.write_bytes(data)
        case "a shard is missing":
            shard.unlink()
        case "no manifest":
            (path / "MANIFEST.json").unlink()
        case "a copy of another":
            shutil.rmtree(path)
            shutil.copytree(max(folder.glob("run/gen-*")), path)
        case "empty":
            shutil.rmtree(path)
            path.mkdir()
        case "a note in a folder":
            shutil.rmtree(path)
            path.mkdir()
            (path / "note").touch()
        case "a file":
            shutil.rmtree(path)
            path.touch()
        case _:
            raise AssertionError(how)


_FOREIGN = {"a copy of another", "a note in a folder", "a file"}


@pytest.mark.parametrize(
    "how",
    [
        "in vain",
        "damaged",
        "no manifest",
        "a file",
        *in_stories("quarantined", "a shard is missing", "a copy of another", "empty", "a note in a folder"),
    ],
)
def test_the_step_of_a_checkpoint_that_was_passed_over_gets_a_new_one(
    folder: Path, small: Train, capfd: Any, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RACKRUN_CHECKPOINT_EVERY", "4")  # a start saves once its replicas have been compared
    small(trained(8))
    store, probation = DurableStore(folder, "run"), Probation(folder / "run")
    newest, older = numbers(folder)[:2]
    former = store.manifest(newest)[0].fencing_token
    passed_over(folder, newest, how)

    ended = small(trained(11))
    assert min(ended.losses) == older + 1
    assert [one.at.step for one in ended.copied if (one.kind, one.outcome) == ("checkpoint", "failed")] == []
    assert "could not be written" not in capfd.readouterr().err
    assert store.manifest(newest)[0].fencing_token > former
    assert store.verify(newest).ok
    assert probation.barred() == {}, "the notes were about the one that is gone"
    assert bool(list(folder.glob(f"run/not-gen-{newest:012d}-*"))) == (how in _FOREIGN), "it is somebody's"
    assert not list(folder.glob("run/.*gen-*"))


class OneRank:
    """A world of one rank, without processes."""

    rank, size, replica_class = 0, 1, ""

    @property
    def groups(self) -> list[Any]:
        return [self]

    def gather_on_host(self, mine: Any) -> list[Any]:
        return [mine]


def written(store: DurableStore, step: int, life: int, *, began: int) -> None:
    """Write the checkpoint of ``step`` as a worker of the start ``life`` does."""
    part = DurableCheckpoints.__new__(DurableCheckpoints)
    part._world = OneRank()  # type: ignore[assignment]
    part._state = SimpleNamespace(lineage=Lineage(began=began, life=life))  # type: ignore[assignment]
    part._store, part._probation = store, Probation(store.directory, store.files)
    part._options = DurableOptions(store.root, 1, 9, "")
    part._reports = SimpleNamespace(copied=lambda *_, **__: None)  # type: ignore[assignment]
    part._lease, part._warnings = None, SaveWarnings()
    layout: Any = SimpleNamespace(layout_hash="layout", total_bytes=5)
    part._write(step, (0, 1), layout, memoryview(b"state"), 0.0, last=False)


@pytest.mark.parametrize("attempts", [0, 3])
def test_notes_on_a_checkpoint_that_is_not_there_any_more_are_not_held_against_its_successor(
    tmp_path: Path, attempts: int
) -> None:
    """Replicas differed before it was written, or somebody has deleted it."""
    (tmp_path / "run").mkdir()
    store, probation = DurableStore(tmp_path, "run"), Probation(tmp_path / "run")
    for _ in range(attempts):
        probation.restored(7)
    if not attempts:
        probation.quarantine(7, "replicas differed then, or soon after (start 1)")
    written(store, 7, 2, began=5)
    assert [info.fencing_token for info in store.checkpoints()] == [2]
    assert probation.barred() == {}


def test_notes_of_this_start_and_notes_that_come_later_stay(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    store, probation = DurableStore(tmp_path, "run"), Probation(tmp_path / "run")
    written(store, 6, 2, began=5)
    probation.quarantine(7, "replicas differed then, or soon after (start 2)")
    written(store, 7, 2, began=5)
    assert [info.number for info in store.checkpoints()] == [6]
    assert list(probation.barred()) == [7]
    written(store, 8, 2, began=5)
    probation.quarantine(8, "by a person")
    written(store, 9, 2, began=5)
    assert sorted(probation.barred()) == [7, 8]


def test_a_start_has_a_larger_number_than_all_before_it_also_when_the_clock_has_gone_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a checkpoint that it has passed over would not give way to its own."""
    (tmp_path / "run").mkdir()
    store, ahead = DurableStore(tmp_path, "run"), 2 * time.time_ns() // 1_000_000
    written(store, 5, ahead, began=-1)
    monkeypatch.setattr(Resumption, "_try", lambda _, number: Position(number))
    state: Any = None
    world: Any = OneRank()
    assert Resumption(world, state, store, "").run() == (Position(5), ahead + 1)


def test_what_is_distrusted_in_this_start_stays_so(folder: Path, small: Train) -> None:
    """Replicas differed after it was computed: its step is not written again before the next start."""
    small(trained(6))
    newest = numbers(folder)[0]
    before = DurableStore(folder, "run").manifest(newest)

    def main(run: Run) -> None:
        model = ddp(run)

        def between(number: int) -> None:
            durable = run._units._durable
            if number == newest - 1 and durable is not None:
                saved, durable._saved = durable._saved, newest  # as if this start had begun it, before a rollback
                durable.distrust(newest - 1)
                durable._saved = saved

        fit(run, model, adam(model), steps=9, between=between)

    Probation(folder / "run").quarantine(newest, "the loss is not a number")
    small(main)
    assert DurableStore(folder, "run").manifest(newest) == before
    assert newest in Probation(folder / "run").quarantined()


def test_what_an_earlier_start_has_written_is_not_distrusted_for_what_this_one_did(folder: Path, small: Train) -> None:
    """It was passed over, because storage failed: its bytes may be right."""
    small(trained(9))
    there, probation = numbers(folder), Probation(folder / "run")
    probation.quarantine(there[0], "by a person")
    probation.quarantine(there[1], "by a person")

    def main(run: Run) -> None:
        model = ddp(run)

        def between(number: int) -> None:
            if number == there[1] - 1 and run._units._durable is not None:
                probation.forget(there[0])
                run._units._durable.distrust(there[1] - 1)
                raise ZeroDivisionError

        fit(run, model, adam(model), steps=9, between=between)

    small(main)
    assert [*probation.quarantined()] == [there[1]]


def test_a_run_that_was_over_already_may_be_started_again_and_again(folder: Path, small: Train) -> None:
    small(trained(3))
    assert small(trained(3)).losses == {}
    assert Probation(folder / "run").attempts() == {}


def test_when_all_are_barred_the_job_ends_with_each_reason_and_a_remedy(folder: Path, small: Train) -> None:
    small(trained(3))
    for number in numbers(folder):
        Probation(folder / "run").quarantine(number, "the loss is not a number")
    ended = small(trained(6))
    assert ended.exit_code != 0
    assert "step 2 is quarantined: the loss is not a number" in str(ended)
    assert "--lift" in str(ended)
