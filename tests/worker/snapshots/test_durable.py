"""Checkpoints on disk: a job that ended, in whatever way, goes on from them, with as many ranks as there are."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from rackrun.checkpoint.base.errors import LayoutMismatch
from rackrun.checkpoint.durable import lease
from rackrun.checkpoint.durable.durable_manifest import MANIFEST
from rackrun.checkpoint.durable.durable_reader import CheckpointReader
from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.checkpoint.durable.durable_writer import CheckpointWriter
from rackrun.checkpoint.durable.probation import Probation
from rackrun.checkpoint.durable.storage.files import Files
from rackrun.protocol.ids import Position
from rackrun.worker.loop.run import Run
from rackrun.worker.snapshots.durable_checkpoints import DurableCheckpoints, DurableOptions
from rackrun.worker.snapshots.resumption import Resumption, refuse_other_training
from rackrun.worker.steps.step import Step
from tests.worker.harness import Ended, say
from tests.worker.scripts import Samples, Script, adam, ddp, fit, fully_sharded, loss_of, net

Train = Callable[..., Ended]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RACKRUN_CHECKPOINT_DIR", str(tmp_path))
    monkeypatch.setenv("RACKRUN_CHECKPOINT_EVERY", "2")
    return tmp_path


def numbers(folder: Path) -> list[int]:
    return [info.number for info in DurableStore(folder, "run").checkpoints()]


def sharded(run: Run) -> nn.Module:
    model = net()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_sharded(model)


def trained(
    make: Callable[[Run], nn.Module], steps: int, after: Callable[[Run, int], None] = lambda _run, _step: None
) -> Script:
    """Train ``steps`` steps, and say what the whole world then has. ``after`` is called after each."""

    def main(run: Run) -> None:
        model = make(run)
        optimizer = adam(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        run.track(model=model, optimizer=optimizer, scheduler=scheduler)
        data = run.loader(Samples())
        done: list[int] = []

        @run.step
        def step(step: Step) -> None:
            for batch in data:
                step.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            done.append(int(step))

        def tell() -> None:
            whole = hashlib.sha256()
            for parameter in model.parameters():
                held = optimizer.state.get(parameter, {})
                for tensor in (parameter, held.get("exp_avg"), held.get("exp_avg_sq")):
                    assert tensor is not None
                    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                    whole.update(full.detach().numpy().tobytes())
            say(whole=whole.hexdigest(), rate=scheduler.get_last_lr(), done=done)

        run.at_end(tell)
        for number in run.steps(steps):
            step(number)
            after(run, int(number))

    return main


def said(ended: Ended, what: str) -> Any:
    """The same on every rank."""
    assert ended.exit_code == 0, ended
    found = [one[what] for one in ended.said.values()]
    assert all(one == found[0] for one in found), found
    return found[0]


@pytest.mark.parametrize("make", [pytest.param(sharded, marks=pytest.mark.stories), ddp])
def test_the_same_command_goes_on_where_it_ended_bit_for_bit(
    make: Callable[[Run], nn.Module], folder: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = train(trained(make, 5))
    assert numbers(folder)[0] == 4
    second = train(trained(make, 9))
    assert said(second, "done") == [5, 6, 7, 8]
    monkeypatch.delenv("RACKRUN_CHECKPOINT_DIR")
    reference = train(trained(make, 9))
    assert said(first, "whole") != said(second, "whole") == said(reference, "whole")
    assert said(second, "rate") == said(reference, "rate")
    assert second.losses == {step: loss for step, loss in reference.losses.items() if step > 4}


@pytest.mark.parametrize("steps", [5, 4, 2])
def test_a_job_that_has_done_more_steps_than_it_is_asked_for_does_what_follows_the_last(
    steps: int, folder: Path, train: Train, capfd: Any
) -> None:
    first = train(trained(ddp, 5))
    again = train(trained(ddp, steps))
    assert said(again, "done") == []
    assert said(again, "whole") == said(first, "whole")
    told = f"step 4 is committed, and run.steps({steps}) ends before it: no step is left, and run.at_end follows"
    assert (told in capfd.readouterr().err) == (steps < 4)


@pytest.mark.parametrize(
    ("make", "before", "after"),
    [
        (make, before, after)
        if (make, before) in {(sharded, 4), (ddp, 3)}
        else pytest.param(make, before, after, marks=pytest.mark.soak)
        for make in (sharded, ddp)
        for before, after in [(4, 3), (2, 3), (3, 1), (1, 2), (5, 2)]
    ],
)
def test_any_number_of_ranks_goes_on_with_the_same_bits(
    make: Callable[[Run], nn.Module], before: int, after: int, folder: Path, train: Train
) -> None:
    first = train(trained(make, 3), ranks=before, spares=0)
    second = train(trained(make, 3), ranks=after, spares=0)
    assert said(second, "done") == []
    assert said(second, "whole") == said(first, "whole")
    assert said(second, "rate") == said(first, "rate")
    assert said(train(trained(make, 5), ranks=after, spares=0), "done") == [3, 4]


@pytest.mark.stories
@pytest.mark.parametrize("make", [sharded, ddp])
def test_a_rank_lost_after_the_resumption_is_replaced(
    make: Callable[[Run], nn.Module], folder: Path, train: Train
) -> None:
    train(trained(make, 4))
    copy = folder.with_name("copy")
    _copy(folder, copy)
    reference = train(trained(make, 8))
    for moment in range(0, len(reference.moments[1]), 23):
        _copy(copy, folder)
        ended = train(trained(make, 8), kill={1: moment})
        assert not ended.differences(reference), ended


@pytest.mark.stories
@pytest.mark.parametrize("make", [sharded, ddp])
def test_a_checkpoint_that_a_loss_cuts_short_is_begun_again_at_once(
    make: Callable[[Run], nn.Module], folder: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is lost while it writes its part of step 59's, beside training. The next would be due after step 119."""
    monkeypatch.setenv("RACKRUN_CHECKPOINT_EVERY", "60")

    def main(run: Run) -> None:
        write = CheckpointWriter.write_shard

        def lost(self: CheckpointWriter, *args: Any, **kwargs: Any) -> bool:
            if run.rank == 1 and run.generation == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return write(self, *args, **kwargs)

        CheckpointWriter.write_shard = lost  # type: ignore[method-assign]
        trained(make, 110)(run)

    ended = train(main)
    assert ended.exit_code == 0, ended
    assert len(ended.plans) == 1, ended
    assert 59 <= min(numbers(folder)) < 109


def dies_in_its_last_write(
    make: Callable[[Run], nn.Module], steps: int, phase: Callable[[Run], Any], after: Path | None = None
) -> Script:
    """Rank 1. ``after``: a folder; rank 1 dies once each rank has seen the gates pass of all phases that follow the
    last step. If only rank 1 had seen that, the others would do the phase again."""

    def main(run: Run) -> None:
        write = CheckpointWriter.write_shard

        def lost(self: CheckpointWriter, *args: Any, **kwargs: Any) -> bool:
            if run.rank == 1 and run.generation == 1 and self.step == steps - 1:
                while after is not None and len([*after.glob("passed-*")]) < run.world_size:
                    time.sleep(0.005)
                os.kill(os.getpid(), signal.SIGKILL)
            return write(self, *args, **kwargs)

        CheckpointWriter.write_shard = lost  # type: ignore[method-assign]
        run.at_end(lambda: phase(run))
        trained(make, steps)(run)
        if run.generation == 1:
            if after is not None:
                (after / f"passed-{run.rank}").touch()
            run._world.wait_broken()

    return main


@pytest.mark.parametrize("make", [sharded, ddp])
def test_the_last_checkpoint_is_made_whole_by_who_takes_a_place(
    make: Callable[[Run], nn.Module], folder: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step follows, after which it would be begun again."""
    ended = train(dies_in_its_last_write(make, 5, lambda _: None))
    assert ended.exit_code == 0, ended
    assert len(ended.plans) == 1, ended
    assert numbers(folder)[0] == 4
    resumed = train(trained(make, 7))
    assert said(resumed, "done") == [5, 6]
    monkeypatch.delenv("RACKRUN_CHECKPOINT_DIR")
    assert said(resumed, "whole") == said(train(trained(make, 7)), "whole")


def test_where_a_phase_has_changed_what_the_last_checkpoint_was_to_hold_it_is_said_not_to_be_whole(
    folder: Path, train: Train, capfd: Any
) -> None:
    def phase(run: Run) -> None:
        with torch.no_grad():
            next(iter(run._state.parameters())).add_(1.0)

    ended = train(dies_in_its_last_write(ddp, 5, phase, folder))
    assert ended.exit_code == 0, ended
    assert 4 not in numbers(folder)
    assert "the last checkpoint, of step 4, is not whole" in capfd.readouterr().err


def test_storage_that_answers_with_errors_stops_nobody(folder: Path, train: Train) -> None:
    """Also where it is only asked whether something is there."""

    def main(run: Run) -> None:
        exists = Path.exists

        def stale(self: Path, **how: Any) -> bool:
            if "gen-" in self.name and run._world.passed >= Position(3):
                raise OSError(errno.ESTALE, "stale file handle")
            return exists(self, **how)

        Path.exists = stale  # type: ignore[method-assign]
        trained(ddp, 9)(run)

    ended = train(main, kill={1: "committed Position(step=4"})
    assert ended.exit_code == 0, ended


def test_a_job_whose_last_copy_is_lost_begins_again_from_the_disk_and_not_from_nothing(
    folder: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_die(run: Run, step: int) -> None:
        """Together, once a checkpoint is whole: whoever outlived the others would give them its state."""
        if step == 5 and run.generation == 1:
            (folder / f"ready-{run.rank}").touch()
            while len([*folder.glob("ready-*")]) < 3 or not numbers(folder):
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)

    ended = train(trained(ddp, 8, all_die), spares=0)
    assert ended.restarted, ended
    assert said(ended, "done")[0] >= 2, "the first steps are not done again"
    monkeypatch.delenv("RACKRUN_CHECKPOINT_DIR")
    assert said(ended, "whole") == said(train(trained(ddp, 8)), "whole")


def test_a_damaged_checkpoint_is_passed_over_by_all(folder: Path, train: Train, capfd: Any) -> None:
    train(trained(sharded, 5))
    newest = DurableStore(folder, "run").path(4)
    shard = next(newest.glob("rank-00001*.safetensors"))
    damaged = bytearray(shard.read_bytes())
    damaged[-5] ^= 1
    shard.write_bytes(damaged)
    older = numbers(folder)[1]
    ended = train(trained(sharded, 6))
    assert said(ended, "done") == list(range(older + 1, 6))
    told = capfd.readouterr().err
    assert "the checkpoint of step 4 is not used" in told
    assert "The job takes an older one instead" in told
    assert "Remedy: restore from another holder" not in told
    assert f"resumed after step {older}" in told
    assert "does not match" in Probation(folder / "run").quarantined()[4], "it must not count among the newest"


def test_a_damaged_manifest_is_told_of_and_passed_over(folder: Path, train: Train, capfd: Any) -> None:
    train(trained(ddp, 5))
    older = numbers(folder)[1]
    manifest = DurableStore(folder, "run").path(4) / MANIFEST
    manifest.write_bytes(bytes([manifest.read_bytes()[0] ^ 1]) + manifest.read_bytes()[1:])
    assert said(train(trained(ddp, 6)), "done") == list(range(older + 1, 6))
    assert "the checkpoint of step 4 is not used" in capfd.readouterr().err
    assert 4 in Probation(folder / "run").quarantined()


@pytest.mark.parametrize("ranks", [{0}, {0, 1, 2}], ids=["on one host", "on all"])
def test_storage_that_cannot_be_read_does_not_let_the_job_begin_anew(
    ranks: set[int], folder: Path, train: Train
) -> None:
    """It may be whole: nothing is held against it."""
    train(trained(ddp, 5))
    there = numbers(folder)

    def main(run: Run) -> None:
        def broken(*_: object) -> int:
            raise OSError(errno.EIO, "broken")

        if run.rank in ranks:
            Files.pread = broken  # type: ignore[method-assign,assignment]
        trained(ddp, 6)(run)

    ended = train(main, max_restarts=0)
    assert ended.exit_code != 0
    assert "can be read" in str(ended)
    assert numbers(folder) == there
    assert not Probation(folder / "run").barred()
    assert said(train(trained(ddp, 6)), "done") == [5]


def test_when_none_can_be_read_the_job_does_not_begin_anew_unasked(folder: Path, train: Train) -> None:
    train(trained(sharded, 3))
    for shard in folder.glob("run/gen-*/*.safetensors"):
        shard.write_bytes(bytes(len(shard.read_bytes())))
    ended = train(trained(sharded, 6), max_restarts=0)
    assert ended.exit_code != 0
    assert "can be read" in str(ended)


def test_another_batch_is_refused(folder: Path, train: Train) -> None:
    train(trained(ddp, 3))
    ended = train(trained(ddp, 6), batch=(6, 2))
    assert ended.exit_code == 1
    assert "global_batch_size=12" in str(ended)


def test_another_batch_is_refused_before_the_script_builds_anything(folder: Path, train: Train) -> None:
    train(trained(ddp, 5))

    def main(run: Run) -> None:
        if run.rank == 0:
            say(built=True)
        trained(ddp, 6)(run)

    ended = train(main, batch=(6, 2))
    assert ended.failure is not None, ended
    assert ended.failure.type == "rackrun.errors.DirectoryRefused"
    assert not any("built" in one for one in ended.said.values()), ended


def test_another_batch_is_not_refused_before_the_start_for_a_checkpoint_that_is_quarantined(
    folder: Path, train: Train
) -> None:
    train(trained(ddp, 5))
    store = DurableStore(folder, "run")
    for number in numbers(folder):
        Probation(store.directory, store.files).quarantine(number, "by hand")
    refuse_other_training(store, "global_batch_size=12, micro_batch_size=2, seed=1234")


def renamed(run: Run) -> None:
    model = ddp(run)
    run.track(model=model, optim=adam(model))
    for _ in run.steps(6):
        pass


def reshaped(run: Run) -> None:
    model = DDP(net(hidden=13))
    optimizer = adam(model)
    run.track(model=model, optimizer=optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 3))
    for _ in run.steps(6):
        pass


@pytest.mark.parametrize(
    ("script", "why"), [(renamed, "nothing is saved under the name 'optim'"), (reshaped, "is wanted")]
)
def test_another_script_is_refused_with_what_does_not_fit(
    script: Script, why: str, folder: Path, train: Train, capfd: Any
) -> None:
    train(trained(ddp, 5))
    assert len(numbers(folder)) > 1
    ended = train(script)
    assert ended.failure is not None, ended
    assert ended.failure.type == "rackrun.errors.DirectoryRefused"
    assert "fits what this script tracks" in ended.failure.message
    assert why in ended.failure.message
    assert "is not used" not in capfd.readouterr().err, "the error says it of all checkpoints, once"


def test_checkpoints_that_do_not_fit_for_different_reasons_are_named_one_by_one(
    folder: Path, train: Train, capfd: Any
) -> None:
    train(trained(ddp, 5))
    older = numbers(folder)[1]

    def main(run: Run) -> None:
        fill = Resumption._fill_from

        def other(self: Resumption, reader: CheckpointReader) -> str:
            if reader.step == older:
                raise LayoutMismatch("it has another shape.", remedy="build it as before.")
            return fill(self, reader)

        Resumption._fill_from = other  # type: ignore[method-assign]
        renamed(run)

    ended = train(main)
    assert ended.failure is not None, ended
    assert ended.failure.type == "rackrun.errors.DirectoryRefused"
    told = capfd.readouterr().err
    assert "the checkpoint of step 4 is not used: nothing is saved under the name 'optim'" in told
    assert f"the checkpoint of step {older} is not used: it has another shape." in told


def test_storage_that_fails_stops_nobody(folder: Path, train: Train, capfd: Any) -> None:
    def main(run: Run) -> None:
        def break_it() -> None:
            if run.is_main and not (folder / "run").exists():
                (folder / "run").write_text("in the way")

        run.every(1, break_it)
        trained(ddp, 8)(run)

    ended = train(main, spares=0)
    assert ended.exit_code == 0, ended
    assert "could not be written" in capfd.readouterr().err


def test_a_disk_that_fails_again_and_again_is_complained_of_once(folder: Path, train: Train, capfd: Any) -> None:
    def main(run: Run) -> None:
        def broken(_files: Files, _fd: int) -> None:
            raise OSError(errno.EIO, "broken")

        Files.fsync = broken  # type: ignore[method-assign,assignment]
        trained(ddp, 9)(run)

    assert train(main, spares=0).exit_code == 0
    told = capfd.readouterr().err
    assert told.count("could not be written") == 3  # by each rank
    assert "not shared by all hosts" not in told, "it is known why"


def test_replicas_share_the_writing(folder: Path, train: Train) -> None:
    train(trained(ddp, 3))
    newest = DurableStore(folder, "run").path(2)
    sizes = [shard.stat().st_size for shard in sorted(newest.glob("*.safetensors"))]
    assert len(sizes) == 3
    one = sum(parameter.nbytes for parameter in net().parameters())
    assert sum(sizes) < 3 * one + 3 * 16_384, "parameters and two moments, once, and a header each"


def _copy(source: Path, target: Path) -> None:
    import shutil

    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)


# -- ranks that are not alike ------------------------------------------------------------------------------------------
def fitted(make: Callable[[Run], nn.Module], steps: int, phase: Callable[[Run], None] | None = None) -> Script:
    """Gradients are averaged by hand where no wrapper does it: ranks may train weights of their own."""

    def main(run: Run) -> None:
        model = make(run)
        if phase is not None:
            run.every(1, lambda: phase(run))
        fit(run, model, adam(model), steps=steps, average=True)

    return main


def two_of_a_kind(run: Run) -> nn.Module:
    torch.manual_seed(run.rank // 2)
    return net(hidden=40)


def normed(run: Run) -> nn.Module:
    return ddp(run, nn.BatchNorm1d(14))


@pytest.mark.parametrize("make", [two_of_a_kind, pytest.param(normed, marks=pytest.mark.stories)])
def test_every_rank_goes_on_with_what_is_its_own(
    make: Callable[[Run], nn.Module], folder: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names and shapes are equal on all ranks, contents are not."""
    train(fitted(make, 5))
    second = train(fitted(make, 9))
    monkeypatch.delenv("RACKRUN_CHECKPOINT_DIR")
    reference = train(fitted(make, 9))
    assert second.state == reference.state, second
    assert second.losses == {step: loss for step, loss in reference.losses.items() if step > 4}


def test_what_differs_between_ranks_is_not_given_to_another_number_of_them(folder: Path, train: Train) -> None:
    train(fitted(two_of_a_kind, 3))
    ended = train(fitted(two_of_a_kind, 5), ranks=2, max_restarts=0)
    assert ended.exit_code != 0
    assert "is not the same on all of the" in str(ended)
    assert "go on with as many ranks" in str(ended)


@pytest.mark.stories
def test_buffers_that_differ_are_found_in_a_resumed_run_too(folder: Path, train: Train) -> None:
    train(fitted(normed, 5))
    copy = folder.with_name("copy")
    _copy(folder, copy)
    reference = train(fitted(normed, 9))
    _copy(copy, folder)
    ended = train(fitted(normed, 9), kill={0: "committed Position(step=7"})
    assert not ended.differences(reference), ended


# -- ends and folders --------------------------------------------------------------------------------------------------
def test_a_job_that_is_told_to_end_in_a_phase_ends_with_a_checkpoint(
    folder: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RACKRUN_CHECKPOINT_EVERY", "100")

    def until_told(run: Run) -> None:
        while run._units.passed.step == 4 and not run._world.drain:
            time.sleep(0.001)  # the control thread hears of it, and tells nobody

    ended = train(fitted(ddp, 30, phase=until_told), drain_at=4)
    assert ended.exit_code == 0, ended
    assert numbers(folder) == [max(ended.losses)]


@pytest.fixture
def rank_1_elsewhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_all = DurableOptions.from_environment

    def of_this(facts: str) -> DurableOptions | None:
        options = of_all(facts)
        assert options is not None
        return replace(options, directory=folder.with_name("own")) if os.environ["RANK"] == "1" else options

    monkeypatch.setattr(DurableOptions, "from_environment", of_this)


@pytest.mark.usefixtures("rank_1_elsewhere")
def test_a_folder_that_hosts_do_not_share_is_named(train: Train, capfd: Any) -> None:
    assert train(fitted(ddp, 9)).exit_code == 0
    assert "not shared by all hosts" in capfd.readouterr().err


@pytest.mark.stories
def test_a_host_that_sees_no_checkpoint_does_not_let_the_job_begin_anew(
    folder: Path, train: Train, request: pytest.FixtureRequest
) -> None:
    train(fitted(ddp, 5))
    request.getfixturevalue("rank_1_elsewhere")
    ended = train(fitted(ddp, 9))
    assert ended.exit_code == 1
    assert "1 of 3 see none" in str(ended)


def test_a_rank_whose_list_of_the_directory_is_old_goes_on_from_the_newest_too(folder: Path, train: Train) -> None:
    train(trained(ddp, 5))

    def main(run: Run) -> None:
        look = DurableStore.look

        def old(store: DurableStore) -> Any:
            whole, left_out = look(store)
            return [info for info in whole if info.number != 4], left_out

        if run.rank == 1:
            DurableStore.look = old  # type: ignore[method-assign,assignment]
        trained(ddp, 6)(run)

    assert said(train(main), "done") == [5]


def test_nobody_looks_for_checkpoints_before_the_directory_is_the_jobs(
    folder: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job before this one may be saving while it is waited for."""
    train(trained(ddp, 5))
    taken = folder / "taken"
    make, take, look = DurableCheckpoints.__init__, lease.Lease.take, DurableStore.look

    def of_a_job(self: DurableCheckpoints, *given: Any) -> None:
        make(self, *given)
        self._owner = "second"

    def slowly(self: lease.Lease, *given: Any) -> None:
        take(self, *given)
        taken.touch()

    def looks(store: DurableStore) -> Any:
        assert taken.exists(), "too early"
        return look(store)

    def main(run: Run) -> None:
        DurableStore.look = looks  # type: ignore[method-assign,assignment]
        trained(ddp, 6)(run)

    monkeypatch.setattr(DurableCheckpoints, "__init__", of_a_job)
    monkeypatch.setattr(lease.Lease, "take", slowly)
    assert said(train(main), "done") == [5]


def test_a_second_job_in_the_same_directory_is_refused_and_begins_when_the_first_is_over(
    folder: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = DurableCheckpoints.__init__

    def of_a_job(self: DurableCheckpoints, *given: Any) -> None:
        made(self, *given)
        self._owner = "second"

    monkeypatch.setattr(DurableCheckpoints, "__init__", of_a_job)
    monkeypatch.setattr(lease, "_DYING_S", 0.3)
    folder.mkdir(exist_ok=True)
    first = lease.Lease(DurableStore(folder, "run"), "first")
    first.take()
    ended = train(fitted(ddp, 5))
    assert ended.exit_code != 0
    assert "in use by another job" in str(ended)
    assert DurableStore(folder, "run").checkpoints() == []
    first.leave(ended=True)
    assert train(fitted(ddp, 5)).exit_code == 0
