"""A bit flips in one replica's memory: the next comparison finds it, the right rank is blamed, and the training ends as if it had not."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.worker.loop.run import Run
from rackrun.worker.snapshots.shard_snapshots import Snapshots
from rackrun.worker.steps.step import Step
from tests.worker.harness import Ended, TinyCluster, say
from tests.worker.scripts import Samples, Script, adam, ddp, fit, fully_sharded, loss_of, net

Train = Callable[..., Ended]
Make = Callable[[Run], nn.Module]

STEPS = 12
EVERY = 4
"""Compared are, right before the update, steps 2 (the first that can be), 4, 8 and 11 (the last)."""
PARAMETER, MOMENT, DIES = "parameter", "exp_avg_sq", "dies"


def normalised(run: Run) -> nn.Module:
    """With statistics that are each rank's own."""
    return ddp(run, nn.BatchNorm1d(14))


def hsdp(run: Run) -> nn.Module:
    model = net()
    for layer in (model[0], model[-1]):
        fully_shard(layer, mesh=run.mesh)
    return fully_sharded(model, mesh=run.mesh)


def stages(run: Run) -> nn.Module:
    """Parameters of the same names and shapes, which have parted."""
    bound = 1.0 / (1 + run.mesh["pp"].get_local_rank())
    return ddp(run, nn.Hardtanh(-bound, bound), process_group=run.mesh["dp"].get_group())


def fsdp(run: Run) -> nn.Module:
    model = net()
    for layer in (model[0], model[-1]):
        fully_shard(layer)
    return fully_sharded(model)


READY: list[tuple[Path, int]] = []
"""While a job of ``train`` runs: a file that grows with every spare that is ready, and how many there are to be before anything is wrong."""


@pytest.fixture
def train(train: Train, tmp_path: Path) -> Train:
    def run(main: Script, **how: Any) -> Ended:
        READY.append((tmp_path / "ready", how.get("spares", 1)))
        try:
            return train(main, mark=READY[-1][0], **how)
        finally:
            READY.clear()

    return run


def wait_for_spares(run: Run, step: int) -> None:
    if step == EVERY and run.generation == 1 and READY:
        mark, spares = READY[-1]
        while spares and not (mark.exists() and mark.stat().st_size >= spares):
            time.sleep(0.005)


def flip(model: nn.Module, optimizer: torch.optim.Optimizer, what: str) -> None:
    """One bit, unseen: no version is counted up."""
    if what == DIES:
        os.kill(os.getpid(), signal.SIGKILL)
    parameter = next(model.parameters())
    tensor: Any = parameter if what == PARAMETER else optimizer.state[parameter][what]
    bits = getattr(tensor, "_local_tensor", tensor).detach().data.view(torch.int32)
    bits.view(-1)[3] ^= 1 << 20


def dies_going_back(run: Run) -> None:
    load, one = Snapshots.load, run.rank == 2 and not run._units.waiting_spare

    def dying(self: Snapshots, *args: Any, **kwargs: Any) -> Any:
        if one:
            os.kill(os.getpid(), signal.SIGKILL)
        return load(self, *args, **kwargs)

    Snapshots.load = dying  # type: ignore[method-assign]


def script(
    make: Make,
    *flips: tuple[int, int, str],
    always: bool = False,
    patch: Callable[[Run], None] = lambda _: None,
    steps: int = STEPS,
) -> Script:
    """Trains. ``flips``: after this step, on this rank, in this. ``always``: whoever holds the rank, and also when the step is done again."""

    def main(run: Run) -> None:
        patch(run)
        model = make(run)
        optimizer = adam(model)

        def strike(step: int) -> None:
            wait_for_spares(run, step)
            for after, rank, what in flips:
                if (step, run.rank) == (after, rank) and (always or run.generation == 1):
                    flip(model, optimizer, what)

        say(rank=run.rank)
        when: dict[str, Any] = {"after" if always else "between": strike}
        fit(run, model, optimizer, steps=steps, **when)

    return main


def stuck_on(rank: int) -> Script:
    """The process that begins as this rank computes step 5, and all after it, wrongly."""

    def main(run: Run) -> None:
        model = ddp(run)
        optimizer = adam(model)
        stuck = run.rank == rank and not run._units.waiting_spare

        def strike(step: int) -> None:
            wait_for_spares(run, step)
            if stuck and step >= 5:
                flip(model, optimizer, PARAMETER)

        say(rank=run.rank)
        fit(run, model, optimizer, steps=STEPS, after=strike)

    return main


@functools.cache
def undisturbed(make: Make, ranks: int, mesh: tuple[tuple[str, int], ...] = ()) -> Ended:
    how: dict[str, Any] = {"mesh": dict(mesh)} if mesh else {}
    ended = TinyCluster(script(make), ranks=ranks, spares=0, **how).run()
    assert ended.exit_code == 0, ended
    return ended


@pytest.fixture(autouse=True)
def every(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def of(steps: int) -> None:
        monkeypatch.setenv("RACKRUN_CHECK_REPLICAS", str(steps))

    of(EVERY)
    return of


def blamed(ended: Ended, because: str = "its replicas") -> list[int]:
    """The ranks whose workers were fenced for it, in order."""
    slots = [line.split()[2].rstrip(":") for line in ended.story if " fence " in line and because in line]
    return [int(slot.partition("/")[2]) for slot in slots]


def same(ended: Ended, reference: Ended) -> None:
    assert not ended.differences(reference), "\n".join([*ended.differences(reference), str(ended)])
    assert not ended.restarted, str(ended)


# -- three replicas or more ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("what", "ranks"), [(PARAMETER, 3), (MOMENT, 4), pytest.param(PARAMETER, 4, marks=pytest.mark.stories)]
)
def test_the_others_outvote_it_and_all_go_back_to_where_they_were_equal(what: str, ranks: int, train: Train) -> None:
    ended = train(script(ddp, (5, 1, what)), ranks=ranks, batch=(24, 2), tainted=True)
    same(ended, TinyCluster(script(ddp), ranks=ranks, batch=(24, 2), spares=0).run())
    assert blamed(ended) == [1]
    (plan,) = ended.plans
    assert plan.rollback == 3
    assert "seen in step 8" in str(ended)


def test_compared_at_every_step_nobody_is_spoilt_and_nobody_goes_back(every: Any, train: Train) -> None:
    every(1)
    ended = train(script(ddp, (5, 1, PARAMETER)))
    same(ended, undisturbed(ddp, 3))
    assert blamed(ended) == [1]
    (plan,) = ended.plans
    assert (plan.rollback, plan.committed.step) == (None, 5)


@pytest.mark.stories
def test_without_a_spare_it_goes_on_with_a_state_that_is_not_its_own(train: Train) -> None:
    ended = train(script(ddp, (5, 1, PARAMETER)), spares=0, tainted=True)
    same(ended, undisturbed(ddp, 3))
    assert blamed(ended) == []
    (plan,) = ended.plans
    assert plan.rollback == 3
    assert [member.rank for member in plan.members if member.fresh] == [1]


@pytest.mark.stories
def test_what_is_each_ranks_own_is_not_compared(train: Train) -> None:
    ended = train(script(normalised))
    same(ended, undisturbed(normalised, 3))
    assert not ended.plans


@pytest.mark.stories
def test_with_buffers_of_ones_own_too_it_ends_the_same(train: Train) -> None:
    ended = train(script(normalised, (5, 1, PARAMETER)), tainted=True)
    same(ended, undisturbed(normalised, 3))
    assert blamed(ended) == [1]


@pytest.mark.stories
def test_two_at_once_of_five_are_both_replaced(train: Train) -> None:
    ended = train(script(ddp, (5, 1, PARAMETER), (6, 3, MOMENT)), ranks=5, spares=2, batch=(20, 2), tainted=True)
    same(ended, TinyCluster(script(ddp), ranks=5, batch=(20, 2), spares=0).run())
    assert sorted(blamed(ended)) == [1, 3]


@pytest.mark.stories
def test_a_rank_that_is_wrong_on_another_gpu_too_is_wrong_by_its_script(train: Train) -> None:
    ended = train(script(ddp, (5, 1, PARAMETER), always=True), tainted=True)
    assert ended.exit_code == 1, ended
    assert "it is not the GPU" in ended.because


# -- two replicas ----------------------------------------------------------------------------------------------------
@pytest.mark.stories
@pytest.mark.parametrize("stuck", [0, 1])
def test_of_two_one_that_is_wrong_again_and_again_in_the_same_way_is_found_by_replacing_them(
    stuck: int, train: Train
) -> None:
    """It sits on rank ``stuck``'s GPU. Rank 1 goes first; then, if that has not helped, rank 0."""
    ended = train(stuck_on(stuck), ranks=2, spares=2, tainted=True)
    same(ended, undisturbed(ddp, 2))
    assert blamed(ended, "wrong time and again")[0] == 1
    assert [plan.rollback for plan in ended.plans[:2]] == [3, 4], "computed again they were equal for a step"
    assert stuck not in [int(member.slot.partition("/")[2]) for member in ended.plans[-1].members]


@pytest.mark.parametrize("what", [PARAMETER, pytest.param(MOMENT, marks=pytest.mark.stories)])
def test_of_two_the_one_is_blamed_whose_bits_do_not_come_again(what: str, train: Train) -> None:
    ended = train(script(ddp, (5, 1, what)), ranks=2, tainted=True)
    same(ended, undisturbed(ddp, 2))
    assert blamed(ended) == [1]
    assert [plan.rollback for plan in ended.plans] == [3, None]


def wrong_once_more(run: Run) -> None:
    """After step 5 on rank 1; and on rank 0, as soon as it has gone back for that."""
    model = ddp(run)
    optimizer = adam(model)
    load, struck = Snapshots.load, bool(run.rank)

    def loading(self: Snapshots, *args: Any, **kwargs: Any) -> Any:
        nonlocal struck
        found = load(self, *args, **kwargs)
        if not struck:
            struck = True
            flip(model, optimizer, PARAMETER)
        return found

    def strike(step: int) -> None:
        if (step, run.rank, run.generation) == (5, 1, 1):
            flip(model, optimizer, PARAMETER)

    Snapshots.load = loading  # type: ignore[method-assign]
    say(rank=run.rank)
    fit(run, model, optimizer, steps=STEPS, between=strike)


def test_of_two_one_that_is_wrong_right_after_going_back_goes_back_once_more(every: Any, train: Train) -> None:
    """What it has in memory is of the last good step, and is wrong all the same: to compute on from it once more would help nobody."""
    every(1)
    ended = train(wrong_once_more, ranks=2, spares=0, tainted=True)
    same(ended, undisturbed(ddp, 2))
    assert [plan.rollback for plan in ended.plans[:2]] == [4, 4]
    assert len(ended.plans) == 3, "computed again they are equal, so it was rank 0"
    assert ended.plans[2].rollback in (4, None), "back once more where not all had told yet that they had gone back"


@pytest.mark.stories
def test_two_that_differ_once_more_end_the_job(train: Train) -> None:
    ended = train(script(ddp, (5, 1, PARAMETER), always=True), ranks=2, spares=0, tainted=True)
    assert ended.exit_code == 3, ended
    assert "nobody can say which are right" in ended.because


@pytest.mark.stories
@pytest.mark.parametrize("what", [PARAMETER, MOMENT])
def test_a_shard_with_two_copies(what: str, train: Train) -> None:
    mesh = {"replicate": 2, "shard": 2}
    ended = train(script(hsdp, (5, 2, what)), ranks=4, mesh=mesh, tainted=True)
    same(ended, undisturbed(hsdp, 4, tuple(mesh.items())))
    assert blamed(ended) == [2], ended


@pytest.mark.stories
def test_stages_with_parameters_alike_are_no_replicas_of_each_other(train: Train) -> None:
    mesh = {"dp": 2, "pp": 2}
    how: dict[str, Any] = {"ranks": 4, "spares": 0, "mesh": mesh}
    ended = train(script(stages, (5, 3, PARAMETER)), tainted=True, **how)
    same(ended, undisturbed(stages, 4, tuple(mesh.items())))
    undecided, decided = ended.plans
    assert (undecided.rollback, decided.rollback) == (3, None)
    (restore,) = decided.restores
    assert (restore.rank, restore.sources) == (3, (1,)), ended


# -- what breaks meanwhile, and what is not compared ---------------------------------------------------------------------------------------------
def test_a_newcomer_that_finds_its_sources_unlike_each_other_sends_all_back(train: Train) -> None:
    """A rank is lost between the flip and the comparison that would have found it."""
    ended = train(script(ddp, (5, 1, PARAMETER), (6, 2, DIES)), spares=2, tainted=True)
    same(ended, undisturbed(ddp, 3))
    assert [plan.rollback for plan in ended.plans] == [None, 3]
    first, second = ([member.slot for member in plan.members] for plan in ended.plans)
    assert first == second, "it costs one spare only"


@pytest.mark.stories
def test_sources_that_differ_where_no_good_state_is_known_end_the_job(every: Any, train: Train) -> None:
    """Nothing is compared, so going back cannot be asked for: each newcomer says so once, and exits the next time."""
    every(0)
    ended = train(script(ddp, (5, 1, PARAMETER), (6, 2, DIES)), spares=3, tainted=True)
    assert ended.exit_code == 3, ended
    assert "rank 2 could not be restored on 3 slots" in ended.because


def test_a_loss_in_a_later_step_after_all_went_back_is_an_ordinary_loss(train: Train) -> None:
    """A rank that has served the replacement of the blamed one must not judge that step by the state it served."""

    def main(run: Run) -> None:
        model = ddp(run)
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())

        @run.step
        def step(step: Step) -> None:
            for batch in data:
                step.backward(loss_of(model, batch))
            if (int(step), run.rank, run.generation) == (6, 0, 2):
                flip(model, optimizer, DIES)
            optimizer.step()
            optimizer.zero_grad()

        for number in run.steps(STEPS):
            step(number)
            wait_for_spares(run, number)
            if (number, run.rank, run.generation) == (5, 1, 1):
                flip(model, optimizer, PARAMETER)

    ended = train(main, spares=2, tainted=True)
    same(ended, undisturbed(ddp, 3))
    assert [plan.rollback for plan in ended.plans] == [3, None], ended
    assert "changed its state" not in str(ended)


@pytest.mark.stories
def test_a_loss_while_all_go_back_sends_them_to_the_same_step(train: Train) -> None:
    """The culprit is rank 1; rank 2 dies when it is to load its snapshot."""
    ended = train(script(ddp, (5, 1, PARAMETER), patch=dies_going_back), ranks=4, spares=3, batch=(24, 2), tainted=True)
    same(ended, TinyCluster(script(ddp), ranks=4, batch=(24, 2), spares=0).run())
    assert [plan.rollback for plan in ended.plans] == [3, 3]


@pytest.mark.stories
def test_where_nothing_is_known_to_be_good_yet_the_job_begins_again(train: Train) -> None:
    ended = train(script(ddp, (1, 1, PARAMETER)), tainted=True)
    assert not ended.differences(undisturbed(ddp, 3)), ended
    assert ended.restarted, ended


def test_before_the_first_comparison_of_a_resumed_run_its_checkpoint_is_good(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All have read the same; if it were barred with the later ones, nothing would be left to begin again from."""
    monkeypatch.setenv("RACKRUN_CHECKPOINT_DIR", str(tmp_path / "checkpoints"))
    assert train(script(ddp, steps=6), spares=0).exit_code == 0
    ended = train(script(ddp, (7, 1, PARAMETER)), spares=0, tainted=True)
    monkeypatch.delenv("RACKRUN_CHECKPOINT_DIR")
    assert (ended.exit_code, ended.restarted) == (0, True), ended
    assert "good is what was there after step 5" in str(ended)
    assert ended.state == undisturbed(ddp, 3).state


@pytest.mark.stories
def test_what_was_good_when_main_was_entered_again_still_is(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal they were after step 3; then one is lost, the others enter main again, and differ before they are compared. Whoever is to
    take the lost one's place waits for that, and the others for the checkpoint of step 3."""
    struck, store = tmp_path / "struck", DurableStore(tmp_path / "checkpoints", "run")

    def main(run: Run) -> None:
        while run._units.waiting_spare and not struck.exists():
            time.sleep(0.005)
        model = hsdp(run)
        optimizer = adam(model)

        def strike(step: int) -> None:
            while step in (1, 3) and run.generation == 1 and not struck.exists() and not store.path(step).exists():
                time.sleep(0.005)
            if (step, run.rank, run.generation) == (5, 2, 1) and not struck.exists():
                flip(model, optimizer, DIES)
            if (step, run.rank, run.world_size) == (7, 1, 2) and not struck.exists():
                struck.touch()
                flip(model, optimizer, PARAMETER)

        fit(run, model, optimizer, steps=STEPS, between=strike)

    mesh = {"replicate": 3, "shard": 1}
    monkeypatch.setenv("RACKRUN_CHECKPOINT_DIR", str(tmp_path / "checkpoints"))
    monkeypatch.setenv("RACKRUN_CHECKPOINT_EVERY", "2")
    ended = train(main, spares=0, mesh=mesh, min_ranks=1, policy="shrink,restart", tainted=True)
    monkeypatch.delenv("RACKRUN_CHECKPOINT_DIR")
    assert (ended.exit_code, ended.restarted) == (0, True), ended
    assert "good is what was there after step 3" in str(ended)
    assert ended.losses[3] == undisturbed(hsdp, 3, tuple(mesh.items())).losses[3]


@pytest.mark.stories
def test_shards_without_a_copy_are_not_compared_and_that_is_said(train: Train, capfd: Any) -> None:
    ended = train(script(fsdp))
    same(ended, undisturbed(fsdp, 3))
    assert "not every rank has a replica, so nothing is compared" in capfd.readouterr().err
