"""Snapshots that are taken while training goes on: what they hold, what they cost, what may disturb them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from rackrun.checkpoint.durable.durable_writer import CheckpointWriter
from rackrun.checkpoint.image.host_copies import HostCopies, ImageCopy
from rackrun.protocol.ids import Generation, Position, snapshot_id
from rackrun.protocol.ids import Step as StepNumber
from rackrun.worker.loop.run import Run
from rackrun.worker.membership.decisions.gate_sums import ZERO_SUMS
from rackrun.worker.membership.worker_membership import WorkerMembership
from rackrun.worker.process.runtime import Runtime
from rackrun.worker.snapshots.shard_snapshots import Snapshots
from rackrun.worker.state.tracked_state import TrackedState
from rackrun.worker.steps.step import Step
from tests.worker.harness import Ended, say
from tests.worker.scripts import Samples, adam, fit, fully_sharded, loss_of, net

Train = Callable[..., Ended]


def steps(run: Run, model: nn.Module, total: int, between: Callable[[int], None] = lambda _: None) -> None:
    fit(run, model, adam(model), steps=total, between=between)


def test_a_snapshot_holds_the_state_after_its_step_however_slow_the_copy(train: Train, tmp_path: Path) -> None:
    """Each copy waits until the next forward and backward have run; a buffer has changed by then, a parameter has not.
    Rank 1 dies when the others, too, have seen step 5 pass, and before its own copy of step 5 is complete."""

    def die_after(run: Run, step: int) -> None:
        if step == 5 and not (tmp_path / "died").exists():
            (tmp_path / f"passed by {run.rank}").touch()
            if run.rank == 1:
                while len(list(tmp_path.glob("passed by *"))) < 3:
                    time.sleep(0.005)
                (tmp_path / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)

    def main(run: Run) -> None:
        model: Any = net(nn.BatchNorm1d(14))
        nn.init.normal_(model[0].weight, generator=torch.Generator().manual_seed(run.rank))  # no replica
        copy, turn, backwards = HostCopies.copy, threading.Condition(), [0, 0]

        def ready(self: HostCopies) -> None:
            backwards[1] = backwards[0]

        def slow(self: HostCopies, *args: Any) -> None:
            with turn:
                # a step that broke may have no backward, and nobody to tell of it
                while (
                    Position(3) <= run._world.passed <= Position(5)
                    and backwards[0] == backwards[1]
                    and not run._world.broken
                ):
                    turn.wait(0.01)
            copy(self, *args)

        def computed(*_: Any) -> None:
            with turn:
                backwards[0] += 1
                turn.notify_all()

        HostCopies.ready, HostCopies.copy = ready, slow  # type: ignore[method-assign, assignment]
        model[-1].register_full_backward_hook(computed)
        steps(run, model, 8, lambda step: die_after(run, step))

    def plain(run: Run) -> None:
        model: Any = net(nn.BatchNorm1d(14))
        nn.init.normal_(model[0].weight, generator=torch.Generator().manual_seed(run.rank))
        steps(run, model, 8)

    reference = train(plain, snapshot_every=1, reduction="none")
    ended = train(main, snapshot_every=1, reduction="none")
    assert not ended.differences(reference), ended
    assert ended.rolled_back, f"{ended}"


@pytest.mark.parametrize("what", ["a parameter", "a setting of the optimizer", "a scheduler", "a buffer"])
def test_tracked_state_that_is_changed_between_two_steps_is_refused(what: str, train: Train) -> None:
    """A step that is done again would not see the change; a snapshot may or may not have it."""

    def main(run: Run) -> None:
        model: Any = net(nn.BatchNorm1d(14))
        optimizer = adam(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        run.track(model=model, optimizer=optimizer, scheduler=scheduler)

        @run.step
        def step(step: Step) -> None:
            optimizer.step()
            optimizer.zero_grad()

        for number in run.steps(5):
            step(number)
            if number == 3 and what == "a parameter":
                with torch.no_grad():
                    model[0].weight.mul_(2)
            elif number == 3 and what == "a setting of the optimizer":
                optimizer.param_groups[0]["lr"] = 0.5
            elif number == 3 and what == "a scheduler":
                scheduler.step()
            elif number == 3:
                model(torch.randn(4, 10))

    ended = train(main)
    assert ended.exit_code == 1, ended
    assert "changed between two steps" in ended.because


def test_storage_that_stands_still_delays_no_step(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setenv("RACKRUN_CHECKPOINT_DIR", str(tmp_path))
    monkeypatch.setenv("RACKRUN_CHECKPOINT_EVERY", "2")

    def main(run: Run) -> None:
        write, released = CheckpointWriter.write_shard, threading.Event()

        def stuck(self: CheckpointWriter, *args: Any, **kwargs: Any) -> bool:
            released.wait(20)
            return write(self, *args, **kwargs)

        CheckpointWriter.write_shard = stuck  # type: ignore[method-assign]
        model: Any = net()
        for layer in (model[0], model[-1]):
            fully_shard(layer)
        steps(run, fully_sharded(model), 9, lambda number: released.set() if number == 7 else None)

    ended = train(main, spares=0)
    assert ended.exit_code == 0, ended
    assert len(ended.losses) == 9
    assert "is skipped: an older one is still being written; training goes on" in capfd.readouterr().err


def sharded(hidden: int = 14) -> nn.Module:
    model = net(hidden=hidden)
    for layer in (model[0], model[-1]):
        fully_shard(layer)
    return fully_sharded(model)


def flip_a_bit(run: Run, step: int) -> None:
    """In the payload of this rank's snapshot of ``step``, in the memory that outlives this process."""
    snapshots = run._units._snapshots
    slot = snapshots._held[step]
    arena = snapshots._arenas[slot]
    assert arena is not None
    payload = np.frombuffer(arena.reader(step, owner=arena.rank).payload, np.uint8)
    at = payload.ctypes.data - arena.memory()[0] + len(payload) // 2
    os.pwrite(snapshots._fds[slot], bytes([payload[len(payload) // 2] ^ 4]), at)


def lost_after(ended: Ended, rank: int, step: int) -> int:
    """A moment of ``rank`` in the step after ``step``, when it has completed a collective there: every rank has committed ``step``, and
    has done what its loop does then. Before it the survivors may not have seen the gate of ``step`` pass."""
    lived = ended.moments[rank]
    entered = f"enters a collective after {Position(step)}"
    _, second = [
        i for i, what in enumerate(lived) if i > lived.index(f"committed {Position(step)}") and what == entered
    ][:2]
    return second


def unfrozen_later(run: Run) -> None:
    """A sharded model whose first layer begins to train in step 6; gradients are set to zero, not dropped, and clipped by their norm."""
    model = net()
    model[0].requires_grad_(False)
    for layer in (model[0], model[-1]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = adam(model)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(Samples())

    @run.step
    def step(step: Step) -> None:
        if int(step) == 6:
            model[0].requires_grad_(True)
        for batch in data:
            step.backward(loss_of(model, batch))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    for number in run.steps(9):
        step(number)


def test_who_goes_back_has_the_gradients_that_a_newcomer_has(train: Train) -> None:
    """To two steps before a layer was unfrozen. With one more on some ranks, though zero, they would add up one more norm than the others, who
    are in the gate by then."""
    reference = train(unfrozen_later, snapshot_every=4)
    assert reference.exit_code == 0, reference
    ended = train(unfrozen_later, snapshot_every=4, kill={1: lost_after(reference, 1, 6)}, deadline_s=60.0)
    assert not ended.differences(reference), ended
    assert [plan.rollback for plan in ended.plans] == [4], ended


@pytest.mark.parametrize("whose", ["a survivor's", pytest.param("the lost rank's", marks=pytest.mark.stories)])
def test_a_damaged_snapshot_is_not_used_and_all_ranks_go_back_to_the_one_before(
    whose: str, train: Train, capfd: Any
) -> None:
    def main(run: Run) -> None:
        flipped: list[int] = []

        def after(number: int) -> None:
            if number == 5 and not flipped and run.rank == (0 if whose == "a survivor's" else 1):
                flip_a_bit(run, 4)
                flipped.append(4)

        model = sharded()
        fit(run, model, adam(model), steps=8, after=after)

    def plain(run: Run) -> None:
        steps(run, sharded(), 8)

    reference = train(plain, spares=0)
    ended = train(main, snapshot_every=2, kill={1: lost_after(reference, 1, 5)})
    assert not ended.differences(reference), ended
    assert [plan.rollback for plan in ended.plans][:2] == [4, 2], str(ended)
    assert not ended.restarted
    assert "the snapshot of step 4 cannot be used: chunk" in capfd.readouterr().err


@pytest.mark.parametrize("ranks", [pytest.param(3, marks=pytest.mark.stories), 1])
def test_the_memory_for_a_spares_snapshots_is_there_or_being_made_before_it_is_needed(ranks: int, train: Train) -> None:
    """It will need it where shards have no replica, and where the only rank has none."""

    def main(run: Run) -> None:
        waits = run._units._rejoin.run

        def needed(*given: Any) -> bool:
            say(had=run._units._snapshots._arenas.complete)
            return waits(*given)

        if run._units.waiting_spare:
            run._units._rejoin.run = needed  # type: ignore[method-assign,assignment]
        steps(run, sharded() if ranks > 1 else net(), 8)

    reference = train(main, ranks=ranks, spares=0)
    lost = ranks // 2
    moment = next(i for i, what in enumerate(reference.moments[lost]) if what.startswith("committed Position(step=5"))
    ended = train(main, ranks=ranks, spares=1, snapshot_every=1, kill={lost: moment})
    assert not ended.differences(reference), ended
    assert ended.said[lost] == {"had": True}


def test_what_others_have_parity_of_stays_in_its_own_slot_until_they_have_something_newer(train: Train) -> None:
    """Parity is of use only beside the other members' own snapshots. One push comes through, that of step 1; a rank is lost that
    has none of step 6, all go back; and whatever is taken from then on without coming through, that to which all went back stays."""

    def main(run: Run) -> None:
        WorkerMembership.has_mirrors = property(lambda _: True)  # type: ignore[method-assign, assignment]
        model: Any = net()
        with torch.no_grad():
            model[0].bias.add_(run.rank)
        page, snapshots = run._runtime.page, run._units._snapshots
        found: dict[int, tuple[int, list[int]]] = {}

        def between(number: int) -> None:
            snapshots.settle()
            found[number] = snapshots._mirrored, sorted(snapshots._held)
            if number == 5 and run.rank == 1 and run.generation == 1:
                snapshots.take = lambda *_, **__: None  # type: ignore[method-assign]
            if page.mirroring:
                page.mirror_done(page.mirror_wanted[0], well=number == 1)  # as an agent does
            say(found=found)

        steps(run, model, 12, between)

    def plain(run: Run) -> None:
        model: Any = net()
        with torch.no_grad():
            model[0].bias.add_(run.rank)
        steps(run, model, 12)

    reference = train(plain, snapshot_every=1, reduction="none")
    lost = next(i for i, what in enumerate(reference.moments[1]) if what.startswith("committed Position(step=6"))
    ended = train(main, snapshot_every=1, kill={1: lost}, reduction="none")
    assert ended.exit_code == 0, ended
    (back_to,) = [plan.rollback for plan in ended.plans]
    assert back_to in (1, 5), "5 where nobody has begun to write over it yet"
    for rank, said in ended.said.items():
        found = {int(number): of for number, of in said["found"].items()}
        assert all(mirrored in held for mirrored, held in found.values() if mirrored >= 0), (rank, found)
        assert {found[number][0] for number in range(8, 12)} == {back_to}, (rank, found)
        if rank != 1:
            assert {found[number][0] for number in range(2, 6)} == {1}, (rank, found)


@pytest.mark.stories
def test_a_thousand_snapshots_take_no_more_memory_threads_or_descriptors_than_ten(train: Train) -> None:
    def main(run: Run) -> None:
        model: Any = net()
        with torch.no_grad():
            model[0].bias.add_(run.rank)
        found: list[tuple[int, int, int]] = []

        def between(number: int) -> None:
            if number in (50, 1_000):
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                found.append((len(os.listdir("/proc/self/fd")), threading.active_count(), pages * 4096))

        steps(run, model, 1_001, between)
        say(found=found)

    ended = train(main, ranks=2, spares=0, snapshot_every=1, reduction="none")
    assert ended.exit_code == 0, ended
    for said in ended.said.values():
        (files, threads, memory), (files_then, threads_then, memory_then) = said["found"]
        assert files_then <= files + 1, "the snapshot in the making may have one"
        assert threads_then <= threads + 1
        assert memory_then < memory + 8 * 2**20


def test_the_newest_whole_snapshot_is_never_the_one_that_is_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is being written, a loss takes everybody back to the newest that is whole: that is the one before it, not the one before that.
    The thread that copies leaves the ends of tensor objects to the thread that trains."""
    rewritten: list[list[int]] = []
    dropped: list[threading.Thread] = []
    drop = ImageCopy.drop

    def noted(copy: ImageCopy) -> None:
        dropped.append(threading.current_thread())
        drop(copy)

    monkeypatch.setattr(ImageCopy, "drop", noted)

    def sealed(slot: int, named: int) -> None:
        if named == -1:
            rewritten.append(sorted(one for one, held in snapshots._held.items() if held != slot))

    model = nn.Linear(3, 1, bias=False)
    runtime, state = one_rank(model, sealed)
    snapshots = Snapshots(runtime, state, every=1)
    try:
        for step in range(6):
            with torch.no_grad():
                model.weight.fill_(step)
            snapshots.take(step)
            snapshots.settle()
            assert max(snapshots._held) == step
        assert rewritten == [[], [0], [1], [2], [3], [4]]
        assert dropped == [threading.current_thread()] * 6
        for newest in (5, 4):
            with torch.no_grad():
                model.weight.fill_(-1)
            snapshots.load(newest, None)
            assert model.weight.tolist() == [[newest] * 3]
    finally:
        close(snapshots, runtime)


def test_a_snapshot_whose_thread_cannot_be_started_leaves_room_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refused(self: threading.Thread) -> None:
        if self.name == "rackrun-snapshot-1":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refused)
    model = nn.Linear(3, 1, bias=False)
    runtime, state = one_rank(model, lambda slot, named: None)
    snapshots = Snapshots(runtime, state, every=1)
    try:
        snapshots.take(0)
        with pytest.raises(RuntimeError, match="can't start"):
            snapshots.take(1)
        assert not snapshots.copying
        snapshots.settle()
        assert list(snapshots._held) == [0], "what was never copied is not there"
        for step in (2, 3):
            with torch.no_grad():
                model.weight.fill_(step)
            snapshots.take(step)
            snapshots.settle()
        assert sorted(snapshots._held) == [2, 3]
        snapshots.load(3, None)
        assert model.weight.tolist() == [[3.0] * 3]
    finally:
        close(snapshots, runtime)


def one_rank(model: nn.Module, sealed: Callable[[int, int], None]) -> tuple[Any, TrackedState]:
    """A runtime with memory for two snapshots, and tracked state with ``model``. ``sealed`` is called with the slot and
    the id of what is sealed, -1 for what will be overwritten."""
    state = TrackedState()
    state.track("model", model)
    runtime = SimpleNamespace(
        world=SimpleNamespace(
            rank=0, layout=0, generation=1, replica_class="", has_mirrors=False, unless_broken=lambda act: act() or True
        ),
        boot=SimpleNamespace(snapshot_fds=[os.memfd_create("test") for _ in range(2)]),
        device=torch.device("cpu"),
        page=SimpleNamespace(mirrored=-1, seal_snapshot=sealed, progress=lambda: None),
    )
    return runtime, state


def close(snapshots: Snapshots, runtime: Any) -> None:
    for arena in snapshots._arenas._arenas:
        assert arena is not None
        arena.close()
    for fd in runtime.boot.snapshot_fds:
        os.close(fd)


def test_snapshots_are_close_to_each_other_after_a_start_and_a_recovery_and_one_slow_one_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = SimpleNamespace(rank=0, size=2, layout=0, generation=1, has_mirrors=False)
    runtime: Any = SimpleNamespace(
        world=world, boot=SimpleNamespace(snapshot_fds=(0, 0)), device=torch.device("cpu"), page=SimpleNamespace()
    )
    snapshots = Snapshots(runtime, TrackedState(), every=None)
    snapshots._costs.extend([0.003, 5.0])
    monkeypatch.setattr(Snapshots, "take", lambda *_, **__: None)
    gate = ZERO_SUMS._replace(step_s=0.06, snapshot_cost_s=2 * snapshots.usual_cost_s)
    taken = []
    for step in range(40):
        world.generation = 1 if step < 21 else 2
        if snapshots.take_if_due(Position(step), gate, now=step in (0, 21)):
            taken.append(step)
    assert taken == [0, 1, 2, 4, 8, 16, 21, 22, 23, 25, 29, 37]


def _of(layout: int, step: int) -> int:
    return int(snapshot_id(Generation(layout), StepNumber(step)))


@pytest.mark.parametrize(("began", "told"), [(4, (_of(0, 4), _of(7, 8))), (3, (_of(7, 8),))])
def test_snapshots_of_a_former_layout_are_told_until_a_gate_has_passed_in_this_one(
    began: int, told: tuple[int, ...]
) -> None:
    page = SimpleNamespace(snapshots=lambda: [_of(7, 8), _of(0, 4)])
    world = SimpleNamespace(layout=Generation(7), passed=Position(4), began=Position(began))
    assert Runtime.snapshots(SimpleNamespace(page=page, world=world)) == told  # type: ignore[arg-type]
