"""The end of the loop: its length, a loop that is left early, and what stands behind it."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.checkpoint.image.host_copies import HostCopies
from rackrun.errors import StepError
from rackrun.protocol.ids import Position
from rackrun.worker.loop import loop_exit
from rackrun.worker.loop.run import Run
from rackrun.worker.restore import loop_end
from rackrun.worker.steps.step import Step
from rackrun.worker.tensors.tensor_bytes import local_part
from rackrun.worker.tensors.undo_copies import NoMemoryForCopies
from tests.variants import in_stories
from tests.worker.harness import Ended, say
from tests.worker.scripts import Samples, adam, ddp, fit, fully_sharded, loss_of, net

Train = Callable[..., Ended]
MakeModel = Callable[[Run], nn.Module]


def fsdp(_: Run) -> nn.Module:
    return fully_sharded(net())


def looped(run: Run, steps: int, body: Callable[[int], bool], make: MakeModel = ddp) -> nn.Module:
    """``body`` is called after each step; when it says so, the loop is left."""
    model = make(run)
    optimizer = adam(model)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(Samples())

    @run.step
    def step(step: Step) -> None:
        for batch in data:
            step.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()

    numbers = run.steps(steps)
    assert len(numbers) == steps
    for number in numbers:
        step(number)
        if body(number):
            break
    return model


def total_of(run: Run) -> float:
    ranks = torch.tensor([float(run.rank + 1)])
    dist.all_reduce(ranks)
    return ranks.item()


def stopped_early(at: dict[int, int], more: Callable[[Run], None] = lambda _: None) -> Callable[[Run], None]:
    """Ranks leave the loop after the steps that ``at`` says (rank -> step), and save at the end."""

    def main(run: Run) -> None:
        def save() -> None:
            say(saved=total_of(run))

        run.at_end(save)
        looped(run, 8, lambda number: number >= at[run.rank])
        more(run)
        say(step=run._units.passed.step)

    return main


@pytest.mark.parametrize(
    "lost", [None, "enters a collective after Position(step=8", "enters a collective after Position(step=7"]
)
def test_a_loop_that_is_left_is_ended_as_any_other(lost: str | None, train: Train) -> None:
    """Also when a rank is lost in the last save, or in what all agree on before it."""
    main = stopped_early({0: 3, 1: 3})
    ended = train(main, ranks=2, kill={1: lost} if lost else {})
    assert ended.exit_code == 0, ended
    assert {said["saved"] for said in ended.said.values()} == {3.0}, ended.said
    assert sorted(ended.losses) == [0, 1, 2, 3]
    assert len(ended.said) == 2


def test_ranks_that_go_on_when_others_leave_are_named(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(what: str) -> None:
        raise StepError(what)

    monkeypatch.setattr(loop_exit, "say", told)
    monkeypatch.setattr(loop_exit, "_TELL_S", 0.1)
    ended = train(stopped_early({0: 5, 1: 3}), ranks=2, spares=0, max_restarts=0)
    assert ended.failure is not None, ended
    assert "rank 1 has left the loop over run.steps() after step 3" in ended.failure.message
    assert "rank 0 has not" in ended.failure.message


def test_code_after_the_loop_may_use_collectives(train: Train) -> None:
    def main(run: Run) -> None:
        looped(run, 3, lambda _: False)
        dist.barrier()
        say(after=total_of(run))
        everyone: list[Any] = [None] * run.world_size
        dist.all_gather_object(everyone, run.rank)
        say(everyone=everyone)

    ended = train(main, ranks=3)
    assert ended.exit_code == 0, ended
    assert [said["after"] for said in ended.said.values()] == [6.0] * 3
    assert all(said["everyone"] == [0, 1, 2] for said in ended.said.values())


def dies_after_the_loop(mark: Path, steps: int = 3) -> Callable[[Run], None]:
    """Rank 1, between two collectives, the first time."""

    def main(run: Run) -> None:
        looped(run, steps, lambda _: False)
        first = total_of(run)
        if run.rank == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        say(first=first, second=total_of(run))

    return main


def dies_when_another_has_returned(mark: Path, gone: Path) -> Callable[[Run], None]:
    """Rank 1, after a collective that rank 0 needed no more of, the first time."""

    def main(run: Run) -> None:
        looped(run, 12, lambda _: False)
        total = total_of(run)
        if run.rank == 0:
            gone.touch()
        elif not mark.exists():
            while not gone.exists():
                time.sleep(0.01)
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        say(total=total)

    return main


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("returned", [False, True])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.stories)])
def test_after_a_loss_the_code_after_the_loop_runs_again_on_all_ranks(
    ranks: int, returned: bool, checkpoints: bool, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who takes over begins it, and would meet the others at another place: each of them is replaced too, from the state that the loop left."""
    if checkpoints:
        monkeypatch.setenv("RACKRUN_CHECKPOINT_DIR", str(tmp_path / "checkpoints"))
    mark = tmp_path / "mark"
    main = dies_when_another_has_returned(mark, tmp_path / "gone") if returned else dies_after_the_loop(mark, 12)
    ended = train(main, ranks=ranks, spares=1, batch=(24, 2))
    assert ended.exit_code == 0, ended
    total = sum(range(ranks + 1))
    said = {"total": total} if returned else {"first": total, "second": total}
    assert ended.said == dict.fromkeys(range(ranks), said)
    assert not ended.restarted
    assert {at for _, at, _ in ended.told if not at.phase} == {Position(step) for step in range(12)}
    if checkpoints:
        assert 11 in [info.number for info in DurableStore(tmp_path / "checkpoints", "run").checkpoints()]


def dies_between_collectives(
    folder: Path, ranks: tuple[int, ...], times: int, make: MakeModel
) -> Callable[[Run], None]:
    """In the code after the loop, each of ``ranks`` so many times."""

    def main(run: Run) -> None:
        looped(run, 12, lambda _: False, make)
        first = total_of(run)
        deaths = len(list(folder.glob(f"{run.rank}-*")))
        if run.rank in ranks and deaths < times:
            (folder / f"{run.rank}-{deaths}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        say(first=first, second=total_of(run))

    return main


@pytest.mark.parametrize("ranks", [(0, 2), *in_stories((1,))], ids=str)
@pytest.mark.parametrize("make", ["ddp", "fsdp"])
def test_it_runs_again_without_spares_after_two_losses_and_with_shards(
    make: str, ranks: tuple[int, ...], train: Train, tmp_path: Path
) -> None:
    makes: dict[str, MakeModel] = {"ddp": ddp, "fsdp": fsdp}
    main = dies_between_collectives(tmp_path, ranks, 1, makes[make])
    ended = train(main, ranks=4, spares=0, batch=(24, 2), snapshot_every=5)
    assert ended.exit_code == 0, ended
    assert ended.said == {rank: {"first": 10.0, "second": 10.0} for rank in range(4)}
    assert not ended.restarted


def test_a_rank_that_is_lost_there_each_time_ends_the_job(train: Train, tmp_path: Path) -> None:
    ended = train(dies_between_collectives(tmp_path, (1,), 1000, ddp), ranks=2, spares=1)
    assert ended.exit_code == 3, ended
    assert "recoveries without one committed step" in ended.because, ended


def test_who_has_met_nobody_after_the_loop_goes_on_with_who_takes_over(train: Train, tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    def main(run: Run) -> None:
        looped(run, 12, lambda _: False)
        if run.rank == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if run.rank == 0 and run.generation == 1:
            run._world.wait_broken()
        say(total=total_of(run), pid=os.getpid())

    ended = train(main, ranks=2, spares=1)
    assert ended.exit_code == 0, ended
    assert [said["total"] for said in ended.said.values()] == [3.0, 3.0]
    assert len([event for event in str(ended).splitlines() if "break for generation" in event]) == 1, ended


@pytest.mark.parametrize("breaks", [False, True])
def test_what_the_script_drops_from_its_optimizer_after_the_loop_is_freed(breaks: bool, train: Train) -> None:
    """A rank that is killed in it has its place taken over by one that has not trained."""

    def main(run: Run) -> None:
        model = ddp(run)
        optimizer = adam(model)
        fit(run, model, optimizer, between=lambda number: breaks and number == 5)
        held = [weakref.ref(of["exp_avg"]) for of in optimizer.state.values()]
        optimizer.state.clear()
        gc.collect()
        say(held=len(held), kept=sum(one() is not None for one in held))

    ended = train(main, ranks=2, spares=1, kill={1: "committed Position(step=4"})
    assert ended.exit_code == 0, ended
    for rank in range(2):
        assert ended.said[rank]["held"] > 0
        assert ended.said[rank]["kept"] == 0


def test_what_the_script_does_to_the_model_behind_the_loop_is_its_own(train: Train) -> None:
    """The best weights, loaded when the loop was left."""

    def main(run: Run) -> None:
        run.at_end(lambda: say(weights=float(next(iter(run._state.parameters())).sum())))
        looped(run, 8, lambda number: number == 2)
        with torch.no_grad():
            for parameter in run._state.parameters():
                parameter.fill_(1.0)

    ended = train(main, ranks=2, spares=0)
    assert ended.exit_code == 0, ended
    assert [said["weights"] for said in ended.said.values()] == [140.0, 140.0]


def changes_after_the_loop(
    folder: Path,
    *,
    change: Callable[[nn.Module], Any],
    leaves: int | None = None,
    phase: Callable[[Run], Any] = lambda _: None,
    make: MakeModel = ddp,
) -> Callable[[Run], None]:
    """Rank 1 is killed once, when all others have changed the model and returned from main. ``leaves``: the step after which they leave the
    loop. ``phase``: follows at the end."""

    def weight(run: Run) -> float:
        return sum(float(local_part(p).double().sum()) for p in run._state.parameters())

    def main(run: Run) -> None:
        if leaves is not None:
            run.at_end(lambda: phase(run))
        model = looped(run, 12, lambda number: number == leaves, make)
        if run.rank == 1 and not (folder / "killed").exists():
            while len(list(folder.glob("changed-*"))) < run.world_size - 1:
                time.sleep(0.01)
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        say(before=weight(run), training=model.training)
        with torch.no_grad():
            change(model)
        say(after=weight(run))
        (folder / f"changed-{run.rank}").touch()

    return main


def doubled(model: nn.Module) -> None:
    for parameter in model.parameters():
        local_part(parameter).mul_(2)


def doubled_unseen(model: nn.Module) -> None:
    for parameter in model.parameters():
        local_part(parameter).data.mul_(2)


@pytest.mark.parametrize("leaves", [None, 4])
@pytest.mark.parametrize(
    "change", [doubled, nn.Module.eval, *in_stories(doubled_unseen, nn.Module.half)], ids=lambda f: f.__name__
)
def test_who_takes_over_begins_the_code_after_the_loop_with_what_the_loop_left(
    change: Callable[[nn.Module], Any], leaves: int | None, train: Train, tmp_path: Path
) -> None:
    """Adapters that are merged twice would be saved with exit code 0."""
    ended = train(changes_after_the_loop(tmp_path, change=change, leaves=leaves), ranks=3, spares=1)
    assert ended.exit_code == 0, ended
    assert (tmp_path / "killed").exists()
    assert ended.said[0] == ended.said[1] == ended.said[2], ended.said


@pytest.mark.parametrize("change", [doubled, nn.Module.eval], ids=lambda f: f.__name__)
def test_without_memory_for_it_a_change_after_the_loop_is_noticed(
    change: Callable[[nn.Module], Any],
    train: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def none(*_: Any, **__: Any) -> None:
        raise NoMemoryForCopies("none is left")

    monkeypatch.setattr(loop_end, "place_for", none)
    ended = train(changes_after_the_loop(tmp_path, change=change), ranks=2, spares=1)
    if change is doubled:
        assert ended.exit_code == 3, ended
        assert "CollectiveBroken" in ended.because, ended
        assert "This rank had changed model/" in capfd.readouterr().err
    else:
        assert ended.exit_code == 0, ended
        assert ended.said[0] == ended.said[1], ended.said


@pytest.mark.parametrize("changes", [True, False])
def test_what_phases_have_changed_since_does_not_go_with_what_the_code_before_them_did(
    changes: bool, train: Train, tmp_path: Path
) -> None:
    """Who takes over in the second phase runs the code before the first one, on what the loop left: nobody has what the first made of that."""
    mark = tmp_path / "mark"

    def phase(run: Run) -> None:
        if changes:
            with torch.no_grad():
                doubled(run._state.modules["model"])

    def later(run: Run) -> None:
        if run.rank == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def main(run: Run) -> None:
        run.at_end(lambda: phase(run))
        run.at_end(lambda: later(run))
        doubled_unseen(looped(run, 12, lambda number: number == 4))

    assert train(main, ranks=2, spares=1).exit_code == (3 if changes else 0)


@pytest.mark.parametrize("change", [doubled, nn.Module.eval], ids=lambda f: f.__name__)
def test_where_all_go_back_no_change_after_the_loop_is_lost_nor_made_twice(
    change: Callable[[nn.Module], Any], train: Train, tmp_path: Path
) -> None:
    """Shards without a copy are those of an older step, from which all do the last steps again. Who has changed its own gives its place up."""
    main = changes_after_the_loop(tmp_path, change=change, make=fsdp)
    ended = train(main, ranks=2, spares=1, snapshot_every=5)
    assert ended.exit_code == 0, ended
    undisturbed = train(main, ranks=2, spares=0)
    assert ended.said == undisturbed.said


@pytest.mark.stories
@pytest.mark.parametrize("snapshot_every", [1, 5])
def test_where_main_is_entered_again_the_code_after_the_loop_runs_once_on_what_the_loop_left(
    snapshot_every: int, train: Train, tmp_path: Path
) -> None:
    """Nobody takes the lost rank's place: the others cut the model anew, as it was before they changed it."""
    main = changes_after_the_loop(tmp_path, change=doubled, make=fsdp)
    how: dict[str, Any] = {"batch": (24, 2), "snapshot_every": snapshot_every, "spares": 0, "reduction": "exact"}
    ended = train(main, ranks=4, min_ranks=1, policy="swap,shrink,wait", **how)
    assert ended.exit_code == 0, ended
    assert len(ended.said) == 3, ended.said
    undisturbed = train(main, ranks=4, **how)
    before = sum(said["before"] for said in undisturbed.said.values())
    assert sum(said["before"] for said in ended.said.values()) == pytest.approx(before, abs=1e-9)
    assert sum(said["after"] for said in ended.said.values()) == pytest.approx(2 * before, abs=1e-9)


def test_the_last_checkpoint_is_of_the_loop_and_not_of_what_follows(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is copied while the script goes on."""
    monkeypatch.setenv("RACKRUN_CHECKPOINT_DIR", str(tmp_path))
    copy = HostCopies.copy

    def late(*args: Any) -> None:
        time.sleep(0.3)
        copy(*args)

    monkeypatch.setattr(HostCopies, "copy", late)

    def main(run: Run) -> None:
        model = looped(run, 6, lambda _: False)
        say(weight=float(next(model.parameters()).sum()))
        doubled_unseen(model)

    first = train(main, ranks=2, spares=0)
    assert first.exit_code == 0, first
    again = train(main, ranks=2, spares=0)
    assert not again.told, "no step is done again"
    assert again.said == first.said


def test_a_break_is_seen_when_the_loop_is_kept_elsewhere(train: Train) -> None:
    """As a progress bar does."""
    kept: list[Any] = []

    def main(run: Run) -> None:
        run.at_end(lambda: say(saved=True))
        original = run.steps

        def steps(total: int) -> Any:
            kept.append(original(total))
            return kept[-1]

        run.steps = steps  # type: ignore[method-assign,assignment]
        looped(run, 8, lambda number: number == 2)

    ended = train(main, ranks=2, spares=0)
    assert ended.exit_code == 0, ended
    assert all(said["saved"] for said in ended.said.values())
