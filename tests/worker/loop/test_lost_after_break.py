"""A rank is lost after a loop that was left early: in the code after it, or in the phases that follow that code."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.worker.loop.run import Run
from tests.variants import in_stories
from tests.worker.harness import Ended, say
from tests.worker.loop.test_loop_end import doubled, fsdp, looped, total_of
from tests.worker.loop.test_lost_after_loop import die_once, weight
from tests.worker.scripts import ddp

Train = Callable[..., Ended]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("meet", [False, *in_stories(True)])
@pytest.mark.parametrize("change", [True, *in_stories(False)])
def test_who_takes_over_in_a_last_phase_has_run_the_code_before_it(
    change: bool, meet: bool, victim: int, train: Train, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"

    def main(run: Run) -> None:
        ran: list[Any] = []

        def later() -> None:
            if run.rank == victim:
                die_once(mark)

        run.at_end(later)
        run.at_end(lambda: say(saved=weight(run), ran=list(ran)))
        model = looped(run, 12, lambda number: number == 4)
        if meet:
            total_of(run)
        ran.append(1)
        say(left=weight(run))
        if change:
            with torch.no_grad():
                doubled(model)

    ended = train(main, ranks=2, spares=1)
    assert ended.exit_code == 0, ended
    a, b = ended.said[0], ended.said[1]
    assert a == b, ended.said
    assert a["saved"] == pytest.approx(a["left"] * (2 if change else 1)), ended.said


def test_a_loop_left_early_has_no_checkpoint_of_its_last_step(train: Train, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("RACKRUN_CHECKPOINT_DIR", str(tmp_path / "ck"))
    mark = tmp_path / "mark"

    def main(run: Run) -> None:
        def later() -> None:
            if run.rank == 1:
                die_once(mark)

        run.at_end(later)
        run.at_end(lambda: say(saved=weight(run)))
        looped(run, 12, lambda number: number == 4)
        total_of(run)

    ended = train(main, ranks=2, spares=1)
    there = [info.number for info in DurableStore(tmp_path / "ck", "run").checkpoints()]
    assert ended.exit_code == 0, ended
    assert 11 not in there, there


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("rule", ["==", *in_stories(">=")])
@pytest.mark.parametrize("meet", [False, *in_stories(True)])
def test_newcomers_after_a_break_do_not_train_on(
    meet: bool, rule: str, checkpoints: bool, train: Train, tmp_path: Path, monkeypatch: Any
) -> None:
    if checkpoints:
        monkeypatch.setenv("RACKRUN_CHECKPOINT_DIR", str(tmp_path / "ck"))
    mark = tmp_path / "mark"

    def main(run: Run) -> None:
        run.at_end(lambda: say(saved=weight(run)))
        looped(run, 12, lambda number: number == 4 if rule == "==" else number >= 4)
        if meet:
            total_of(run)
        if run.rank == 1:
            die_once(mark)
        if not meet and run.generation == 1 and run.rank == 0:
            run._world.wait_broken()
        say(total=total_of(run), w=weight(run))

    ended = train(main, ranks=2, spares=1, deadline_s=40)
    assert ended.exit_code == 0, ended
    assert ended.said[0] == ended.said[1]
    assert sorted(ended.losses) == [0, 1, 2, 3, 4], sorted(ended.losses)
    if checkpoints:
        there = [info.number for info in DurableStore(tmp_path / "ck", "run").checkpoints()]
        assert 11 not in there


def test_a_merge_after_a_break_never_meets_gradients(train: Train, tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    def main(run: Run) -> None:
        run.at_end(lambda: None)
        looped(run, 12, lambda number: number == 4)
        if run.rank == 1:
            die_once(mark)
        if run.generation == 1 and run.rank == 0 and not (tmp_path / "off").exists():
            run._world.wait_broken()
        flat = torch.cat([p.detach().reshape(-1) for p in reversed(list(run._state.parameters()))])
        mine = float(flat.double().abs().sum())
        dist.all_reduce(flat)
        flat /= run.world_size
        with (tmp_path / f"saved-{run.rank}").open("a") as file:
            file.write(
                f"{mine} {float(flat.double().abs().sum())} gen {run.generation} step {run._units.passed.step}\n"
            )

    ended = train(main, ranks=2, spares=1, deadline_s=40)
    assert ended.exit_code == 0, ended
    for path in tmp_path.glob("saved-*"):
        for line in path.read_text().splitlines():
            mine, merged = line.split()[:2]
            assert float(mine) == pytest.approx(float(merged)), (path.name, path.read_text())


@pytest.mark.stories
@pytest.mark.parametrize("every", [1, 5])
def test_shards_after_a_break(every: int, train: Train, tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    def main(run: Run) -> None:
        run.at_end(lambda: say(saved=weight(run)))
        looped(run, 12, lambda number: number == 7, fsdp)
        if run.rank == 1:
            while len(list(tmp_path.glob("r-*"))) < 2 and not mark.exists():
                time.sleep(0.01)
            time.sleep(0 if mark.exists() else 0.3)
            die_once(mark)
        (tmp_path / f"r-{run.rank}").touch()
        say(w=weight(run), left=run._units._left_after)

    ended = train(main, ranks=3, spares=1, snapshot_every=every, deadline_s=40)
    assert ended.exit_code == 0, ended
    assert sorted(ended.losses) == list(range(8))
    undisturbed = train(main, ranks=3, spares=0, snapshot_every=every, deadline_s=40)
    assert {r: s["saved"] for r, s in ended.said.items()} == {r: s["saved"] for r, s in undisturbed.said.items()}


def test_a_break_at_the_top_of_the_body_stays_one(train: Train, tmp_path: Path) -> None:
    """The rule is known from the last step alone. The others have returned from main when a rank is lost."""

    def main(run: Run) -> None:
        from tests.worker.scripts import Samples, adam, loss_of

        run.every(1, lambda: None)
        model = ddp(run)
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())

        @run.step
        def step(step: Any) -> None:
            for batch in data:
                step.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()

        stop = False
        for number in run.steps(12):
            if stop:
                break
            step(number)
            stop = number == 4
        if run.rank == 1 and not (tmp_path / "mark").exists():
            while not (tmp_path / "returned").exists():
                time.sleep(0.01)
            time.sleep(0.3)
            die_once(tmp_path / "mark")
        say(w=weight(run))
        (tmp_path / "returned").touch()

    ended = train(main, ranks=2, spares=1, deadline_s=20)
    assert ended.exit_code == 0, ended
    assert sorted(ended.losses) == [0, 1, 2, 3, 4], sorted(ended.losses)
