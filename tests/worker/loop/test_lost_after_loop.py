"""A rank is lost in the code after the loop: what others have done by then, and what they were to be given, in every combination."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rackrun.worker.loop.run import Run
from rackrun.worker.tensors.tensor_bytes import local_part
from tests.variants import in_stories
from tests.worker.harness import Ended, say
from tests.worker.loop.test_loop_end import doubled, fsdp, looped, total_of
from tests.worker.scripts import ddp

Train = Callable[..., Ended]


def weight(run: Run) -> float:
    return sum(float(local_part(p).double().sum()) for p in run._state.parameters())


def die_once(mark: Path) -> None:
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("lost", [True, False])
def test_who_goes_back_goes_on_in_its_own_code_where_it_was(lost: bool, train: Train, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    if not lost:
        mark.touch()

    def main(run: Run) -> None:
        looped(run, 12, lambda _: False, fsdp)
        if run.rank == 1:
            die_once(mark)
        if run.rank == 0 and run.generation == 1 and lost:
            run._world.wait_broken()
        first = total_of(run)
        drawn = float(torch.rand(()))
        say(first=first, second=total_of(run), drawn=drawn, w=weight(run))

    ended = train(main, ranks=2, spares=1, snapshot_every=5)
    assert ended.exit_code == 0, ended
    assert ended.said[0]["drawn"] == ended.said[1]["drawn"], ended.said


def test_a_collective_that_breaks_between_living_ranks_runs_again(train: Train, tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    def main(run: Run) -> None:
        looped(run, 12, lambda _: False)
        first = total_of(run)
        if run.rank == 0 and not mark.exists():
            mark.touch()
            run._world.collective_failed(run._world.generation, RuntimeError("connection reset"))
        say(first=first, second=total_of(run))

    ended = train(main, ranks=2, spares=1)
    assert ended.exit_code == 0, ended


@pytest.mark.parametrize("meet", [False, True])
def test_a_drained_job_recovers_after_its_loop_as_any_other(meet: bool, train: Train, tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    def main(run: Run) -> None:
        looped(run, 30, lambda _: time.sleep(0.05) or False)  # type: ignore[func-returns-value]
        if meet:
            total_of(run)
        if run.rank == 1:
            die_once(mark)
        if not meet and run.generation == 1:
            run._world.wait_broken()
        say(total=total_of(run), at=run._units.passed.step, w=weight(run))

    ended = train(main, ranks=2, spares=1, drain_at=5)
    assert ended.exit_code == 0, ended
    assert ended.said[0] == ended.said[1]
    assert ended.said[0]["at"] < 29


@pytest.mark.parametrize("where", ["served", *in_stories("resumed", "broken")])
def test_a_second_rank_is_lost_in_the_recovery(where: str, train: Train, tmp_path: Path) -> None:
    mark, again = tmp_path / "mark", tmp_path / "again"

    def main(run: Run) -> None:
        if run.rank == 2:
            reached = run._world.stages.reached

            def kill(stage: str) -> None:
                if stage == where and mark.exists():
                    die_once(again)
                reached(stage)

            run._world.stages.reached = kill  # type: ignore[method-assign]
        looped(run, 12, lambda _: False)
        first = total_of(run)
        if run.rank == 1:
            die_once(mark)
        say(first=first, second=total_of(run), w=weight(run))

    ended = train(main, ranks=3, spares=1)
    assert ended.exit_code == 0, ended
    assert ended.said[0] == ended.said[1] == ended.said[2]


@pytest.mark.stories
def test_newcomer_lost_while_the_last_checkpoint_is_written(train: Train, tmp_path: Path, monkeypatch: Any) -> None:
    from rackrun.worker.snapshots.durable_checkpoints import DurableCheckpoints

    monkeypatch.setenv("RACKRUN_CHECKPOINT_DIR", str(tmp_path / "ck"))
    write = DurableCheckpoints._write
    first, mark, again = tmp_path / "first", tmp_path / "mark", tmp_path / "again"

    def slow(self: Any, step: int, part: Any, *args: Any, **more: Any) -> None:
        if step == 11 and part[0] == 0 and not first.exists():
            first.touch()
            time.sleep(4)
        write(self, step, part, *args, **more)

    monkeypatch.setattr(DurableCheckpoints, "_write", slow)

    def main(run: Run) -> None:
        waits = run._world.wait_broken

        def dies() -> None:  # the newcomer, waiting for the other to be replaced
            time.sleep(0.5)
            die_once(again)
            waits()

        run._world.wait_broken = dies  # type: ignore[method-assign]
        looped(run, 12, lambda _: False)
        one = total_of(run)
        if run.rank == 1:
            die_once(mark)
        say(one=one, two=total_of(run), w=weight(run))

    ended = train(main, ranks=2, spares=2)
    assert again.exists()
    assert ended.exit_code == 0, ended
    assert not ended.restarted


@pytest.mark.parametrize("victim", [2, *in_stories(0, 1, 3)])
def test_collectives_in_subgroups_count_too(victim: int, train: Train, tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    def main(run: Run) -> None:
        low, high = dist.new_group([0, 1]), dist.new_group([2, 3])
        mine = low if run.rank < 2 else high
        model = looped(run, 12, lambda _: False)
        before = weight(run)
        with torch.no_grad():
            doubled(model)
        if run.rank < 2:
            dist.barrier(mine)
        if run.rank == victim:
            time.sleep(0.3)
            die_once(mark)
        if run.rank >= 2:
            time.sleep(0.6)
        ranks = torch.tensor([float(run.rank + 1)])
        dist.all_reduce(ranks, group=mine)
        say(sub=ranks.item(), before=before, after=weight(run), all=total_of(run))

    ended = train(main, ranks=4, spares=1, batch=(24, 2))
    assert ended.exit_code == 0, ended
    for rank in range(4):
        said = ended.said[rank]
        assert said["after"] == pytest.approx(2 * said["before"])
        assert said["before"] == ended.said[0]["before"]
        assert said["sub"] == (3.0 if rank < 2 else 7.0)
        assert said["all"] == 10.0


@pytest.mark.stories
@pytest.mark.parametrize("victims", [(1,), (0,), (0, 2)], ids=str)
def test_buffers_and_asynchronous_collectives(victims: tuple[int, ...], train: Train, tmp_path: Path) -> None:
    def main(run: Run) -> None:
        from torch import nn

        model = looped(run, 12, lambda _: False, lambda r: ddp(r, nn.BatchNorm1d(14)))
        before = hash_of(run)
        model.train()
        for seed in range(3):  # recalibrate batch norm: forward in training mode changes buffers, DDP broadcasts them
            with torch.no_grad():
                model(torch.randn(4, 10, generator=torch.Generator().manual_seed(seed + run.rank)))
        floats = [buffer for buffer in model.buffers() if buffer.dtype.is_floating_point]
        work = [dist.all_reduce(buffer, async_op=True) for buffer in floats]
        if run.rank in victims:
            die_once(tmp_path / f"mark{run.rank}")
        for one in work:
            one.wait()
        say(before=before, after=hash_of(run), all=total_of(run))

    def hash_of(run: Run) -> dict[str, float]:
        return {path: float(t.double().sum()) for path, t in run._state.tensors().items()}

    ended = train(main, ranks=3, spares=1)
    for rank in victims:
        (tmp_path / f"mark{rank}").touch()
    undisturbed = train(main, ranks=3, spares=0)
    assert ended.exit_code == 0, ended
    assert ended.said == undisturbed.said, [ended.said, undisturbed.said]


@pytest.mark.stories
@pytest.mark.parametrize("meet", [False, True])
@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("victims", [(1,), (0, 1)], ids=str)
def test_changed_shards_are_those_of_an_undisturbed_run(
    victims: tuple[int, ...], every: int, meet: bool, train: Train, tmp_path: Path
) -> None:
    def main(run: Run) -> None:
        model = looped(run, 12, lambda _: False, fsdp)
        before = weight(run)
        with torch.no_grad():
            doubled(model)
        if meet:
            total_of(run)
        if run.rank in victims:
            die_once(tmp_path / f"mark{run.rank}")
        if (
            not meet
            and run.generation == 1
            and (tmp_path / "mark1").exists()
            and "RACKRUN_TEST_UNDISTURBED" not in os.environ
        ):
            run._world.wait_broken()
        model.eval()
        with torch.no_grad():
            out = float(model(torch.ones(3, 10)).double().sum())
        say(before=before, out=out, total=total_of(run), after=weight(run))

    ended = train(main, ranks=3, spares=1, snapshot_every=every, deadline_s=60)
    for rank in victims:
        (tmp_path / f"mark{rank}").touch()
    os.environ["RACKRUN_TEST_UNDISTURBED"] = "1"
    try:
        undisturbed = train(main, ranks=3, spares=0, snapshot_every=every)
    finally:
        del os.environ["RACKRUN_TEST_UNDISTURBED"]
    assert ended.exit_code == 0, ended
    assert ended.said == undisturbed.said, [ended.said, undisturbed.said]


@pytest.mark.stories
@pytest.mark.parametrize("checkpoints", [False, True])
def test_phases_at_the_end_and_the_code_after_them_change_state_once(
    checkpoints: bool, train: Train, tmp_path: Path, monkeypatch: Any
) -> None:
    if checkpoints:
        monkeypatch.setenv("RACKRUN_CHECKPOINT_DIR", str(tmp_path / "ck"))
    mark = tmp_path / "mark"

    def main(run: Run) -> None:
        def swap_in() -> None:
            with torch.no_grad():
                doubled(run._state.modules["model"])

        run.at_end(swap_in)
        model = looped(run, 12, lambda _: False)
        left = weight(run)
        with torch.no_grad():
            doubled(model)
        total_of(run)
        if run.rank == 1:
            die_once(mark)
        say(left=left, after=weight(run), total=total_of(run))

    ended = train(main, ranks=2, spares=1)
    first = ended.said
    if checkpoints:
        monkeypatch.setenv("RACKRUN_CHECKPOINT_DIR", str(tmp_path / "ck2"))
    undisturbed = train(main, ranks=2, spares=0)
    assert ended.exit_code == 0, ended
    assert first == undisturbed.said
    if checkpoints:
        again = train(main, ranks=2, spares=0)
        assert again.said == first, [again.said, first]
        monkeypatch.setenv("RACKRUN_CHECKPOINT_DIR", str(tmp_path / "ck"))
        again = train(main, ranks=2, spares=0)
        assert again.said == first, [again.said, first]


def test_in_a_world_that_shrinks_nobody_goes_on_as_another_rank(train: Train, tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    def main(run: Run) -> None:
        looped(run, 12, lambda _: False)
        seen = sum(float(i) for i in range(run.rank, 30, run.world_size))
        if run.rank == 1:
            die_once(mark)
        if run.generation == 1:
            run._world.wait_broken()
        total = torch.tensor([seen])
        dist.all_reduce(total)
        say(total=total.item())

    ended = train(main, ranks=3, spares=0, batch=(24, 2), min_ranks=1, policy="shrink,wait")
    assert ended.exit_code == 3, ended
    assert "CollectiveBroken" in ended.because, ended


@pytest.mark.stories
@pytest.mark.parametrize("meet", [False, True])
def test_a_sharded_world_that_shrinks_begins_with_what_the_loop_left(meet: bool, train: Train, tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    def main(run: Run) -> None:
        model = looped(run, 12, lambda _: False, fsdp)
        before = torch.tensor([weight(run)])
        with torch.no_grad():
            doubled(model)
        if meet:
            total_of(run)
        if run.rank == 1:
            die_once(mark)
        total = total_of(run)
        dist.all_reduce(before)
        after = torch.tensor([weight(run)])
        dist.all_reduce(after)
        say(total=total, before=before.item(), after=after.item())

    how: Any = {"batch": (24, 2), "snapshot_every": 1, "reduction": "exact"}
    ended = train(main, ranks=4, spares=0, min_ranks=1, policy="swap,shrink,wait", **how)
    assert ended.exit_code == 0, ended
    undisturbed = train(main, ranks=4, spares=0, **how)
    size = len(ended.said)
    for said in ended.said.values():
        assert said["total"] == sum(range(size + 1)), ended.said
        assert said["before"] == pytest.approx(undisturbed.said[0]["before"], abs=1e-5)
        assert said["after"] == pytest.approx(undisturbed.said[0]["after"], abs=1e-5)


@pytest.mark.stories
def test_a_second_rank_is_lost_after_all_went_back(train: Train, tmp_path: Path) -> None:
    def main(run: Run) -> None:
        looped(run, 12, lambda _: False, fsdp)
        if run.rank == 1 and run.generation == 1:
            die_once(tmp_path / "one")
        if run.rank == 0 and run.generation == 1:
            run._world.wait_broken()
        first = total_of(run)
        if run.rank == 1:
            die_once(tmp_path / "two")
        say(first=first, w=weight(run))

    ended = train(main, ranks=2, spares=1, snapshot_every=5, deadline_s=40)
    assert ended.exit_code == 0, ended


def test_a_backward_of_the_scripts_own_runs_again(train: Train, tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    def main(run: Run) -> None:
        model = looped(run, 12, lambda _: False)
        for i in range(4):
            if run.rank == 1 and i == 2:
                die_once(mark)
            model(torch.ones(3, 10)).sum().backward()
        grad: Any = next(model.parameters()).grad
        say(total=total_of(run), grad=float(grad.sum()))

    ended = train(main, ranks=2, spares=1, deadline_s=40)
    assert ended.exit_code == 0, ended


def test_ranks_that_have_returned_are_lost_before_another(train: Train, tmp_path: Path) -> None:
    def main(run: Run) -> None:
        looped(run, 12, lambda _: False)
        total = total_of(run)
        if run.rank == 1:
            # returns, finishes, is killed by rank 2 later
            (tmp_path / "pid1").write_text(str(os.getpid()))
        if run.rank == 2 and not (tmp_path / "killed").exists():
            time.sleep(0.5)
            (tmp_path / "killed").touch()
            os.kill(int((tmp_path / "pid1").read_text()), signal.SIGKILL)
            time.sleep(0.5)
            die_once(tmp_path / "two")
        say(total=total, w=weight(run))

    ended = train(main, ranks=3, spares=1, deadline_s=40)
    assert ended.exit_code == 0, ended
    assert ended.said[0] == ended.said[1] == ended.said[2]


def test_every_kind_of_tracked_object_is_as_the_loop_left_it(train: Train, tmp_path: Path) -> None:
    class Best:
        def __init__(self) -> None:
            self.metric, self.weights = 0.0, {"a": torch.zeros(3)}

        def state_dict(self) -> dict[str, Any]:
            return {"metric": self.metric, "weights": self.weights}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.metric, self.weights = state["metric"], state["weights"]

    def main(run: Run) -> None:
        from tests.worker.scripts import Samples, adam, loss_of

        model = ddp(run)
        optimizer = adam(model)
        best = Best()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        ema = torch.optim.swa_utils.AveragedModel(model)
        run.track(model=model, optimizer=optimizer, best=best, scheduler=scheduler, ema=ema)
        data = run.loader(Samples())

        @run.step
        def step(step: Any) -> None:
            for batch in data:
                step.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            ema.update_parameters(model)
            best.metric += 1
            best.weights["a"] = best.weights["a"] + 1

        for number in run.steps(12):
            step(number)
        before = (best.metric, float(best.weights["a"].sum()), optimizer.param_groups[0]["lr"], weight(run))
        with torch.no_grad():
            for p, q in zip(model.parameters(), ema.parameters(), strict=True):
                p.copy_(q * 2)
        best.metric *= 2
        best.weights["b"] = torch.ones(2)
        optimizer.param_groups[0]["lr"] = 5.0
        optimizer.state.clear()
        total_of(run)
        if run.rank == 1:
            die_once(tmp_path / "mark")
        say(
            before=before,
            after=(best.metric, sorted(best.weights), optimizer.param_groups[0]["lr"], weight(run)),
            t=total_of(run),
        )

    ended = train(main, ranks=3, spares=1, deadline_s=40)
    undisturbed = train(main, ranks=3, spares=0)
    assert ended.exit_code == 0, ended
    assert ended.said == undisturbed.said


def test_all_go_back_where_one_has_returned(train: Train, tmp_path: Path) -> None:
    def main(run: Run) -> None:
        looped(run, 12, lambda _: False, fsdp)
        w = weight(run)
        if run.rank == 1:
            while not (tmp_path / "r0").exists():
                time.sleep(0.01)
            time.sleep(0.3)
            die_once(tmp_path / "mark")
        (tmp_path / f"r{run.rank}").touch()
        say(w=w)

    ended = train(main, ranks=2, spares=1, snapshot_every=5, deadline_s=40)
    undisturbed = train(main, ranks=2, spares=0, snapshot_every=5, deadline_s=40)
    assert ended.exit_code == 0, ended
    assert ended.differences(undisturbed) == [], ended.differences(undisturbed)


@pytest.mark.stories
def test_another_rank_is_lost_while_one_undoes_its_changes_to_hand_its_shards_over(
    train: Train, tmp_path: Path
) -> None:
    """The worst moment: its script must not go on with what was undone."""
    undone = tmp_path / "undone"

    def main(run: Run) -> None:
        world, end = run._world, run._units._rejoin.loop_end
        put_back = end.put_back

        def slowly() -> bool:
            if run.rank == 0 and end.changed() and not undone.exists():
                done = put_back()
                undone.touch()
                generation = world.machine.announced
                while world.machine.announced == generation:
                    time.sleep(0.01)
                return done
            return put_back()

        end.put_back = slowly  # type: ignore[method-assign]
        model = looped(run, 12, lambda _: False, fsdp)
        before = weight(run)
        with torch.no_grad():
            doubled(model)
        if run.rank == 1:
            die_once(tmp_path / "first")
        if run.rank == 2 and run.generation == 1:
            world.wait_broken()
            while not undone.exists():
                time.sleep(0.01)
            die_once(tmp_path / "second")
        say(before=before, after=weight(run))

    how: dict[str, Any] = {"batch": (24, 2), "snapshot_every": 1, "reduction": "exact", "spares": 0}
    ended = train(main, ranks=4, min_ranks=1, policy="swap,shrink,wait", deadline_s=60, **how)
    assert ended.exit_code == 0, ended
    assert undone.exists()
    for said in ended.said.values():
        assert said["after"] == pytest.approx(2 * said["before"]), ended.said
