"""Whole jobs that read streams: ranks are lost, worlds change and go back, and each sample is in one committed step."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from rackrun.protocol.ids import Position
from rackrun.worker.batch.lr_rule import ScaleLR
from rackrun.worker.loop.run import Run
from rackrun.worker.steps.step import Step
from tests.variants import in_stories
from tests.worker.data.streamed import CountsEpochs, Forgets, KeepsStart, Shuffled, Stateless, Vectors
from tests.worker.harness import Ended, Swap, moments, say
from tests.worker.scripts import WIDTH, Script, adam, ddp, fully_sharded, loss_of, net

Train = Callable[..., Ended]
STEPS, BATCH = 14, (12, 2)
SHARDS, MICRO = BATCH[0] // BATCH[1], BATCH[1]
SHRINK = {"min_ranks": 1, "policy": "swap,shrink,wait", "spares": 0}


class NoState(Stateless):
    sample = Vectors.sample


def replicated(run: Run) -> nn.Module:
    return ddp(run, nn.LayerNorm(14))


def sharded(run: Run) -> nn.Module:
    return fully_sharded(net(nn.LayerNorm(14)))


def script(
    make: Callable[[int, int], Any] = Vectors,
    model_of: Callable[[Run], nn.Module] = replicated,
    *,
    steps: int = STEPS,
    before: Callable[[Run, int], None] = lambda run, step: None,
    **stream: Any,
) -> Script:
    def main(run: Run) -> None:
        model = model_of(run)
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data = run.stream(make, **{"state_every": 4, **stream})

        @run.step
        def step(step: Step) -> None:
            for batch in data:
                step.backward(loss_of(model, batch))
                batch.zero_()  # the script's own: whoever does the step again gets it as it was
            optimizer.step()
            optimizer.zero_grad()

        for number in run.steps(steps):
            before(run, number)
            step(number)

    return main


def ids_of(turn: int) -> list[int]:
    """Of all samples of the n-th step that reads a stream."""
    return sorted(
        (turn * MICRO + index) * SHARDS + shard for index, shard in itertools.product(range(MICRO), range(SHARDS))
    )


def each_sample_once(ended: Ended, steps: int = STEPS) -> None:
    assert ended.exit_code == 0, ended
    assert {at.step: ended.samples(at) for at in ended.ids if not at.phase} == {n: ids_of(n) for n in range(steps)}


def after(step: int) -> str:
    """A moment of a rank: it has committed this step."""
    return f"committed Position(step={step},"


def same_with_a_loss(ended: Ended, reference: Ended) -> None:
    assert ended.plans, "nobody was lost"
    assert not ended.differences(reference), ended


@pytest.mark.feature("Streams", "any rank lost, each sample in one committed step")
@pytest.mark.parametrize("make", [Vectors, NoState])
@pytest.mark.parametrize("rank", [1, *in_stories(0, 2)])
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.stories) for seed in range(2, 8))])
def test_whoever_is_lost_at_whatever_moment_it_is_the_same_training(
    make: Any, rank: int, seed: int, train: Train
) -> None:
    reference = train(script(make))
    each_sample_once(reference)
    ended = train(script(make), kill={rank: moments(reference, rank, seed)[0]})
    same_with_a_loss(ended, reference)
    each_sample_once(ended)


def test_whoever_takes_a_rank_over_is_lost_while_it_reads_what_was_used(train: Train, tmp_path: Path) -> None:
    def main(run: Run) -> None:
        def make(shard: int, shards: int) -> Any:
            if run.generation > 1:
                with contextlib.suppress(FileExistsError):
                    (tmp_path / "lost").touch(exist_ok=False)
                    os.kill(os.getpid(), signal.SIGKILL)
            return Vectors(shard, shards)

        script(make)(run)

    reference = train(script())
    ended = train(main, kill={1: after(6)}, spares=2)
    assert len(ended.plans) == 2, ended
    same_with_a_loss(ended, reference)
    each_sample_once(ended)


@pytest.mark.parametrize("make", [KeepsStart, CountsEpochs])
def test_whoever_reads_on_in_an_epoch_begins_the_next_one_as_the_others_do(make: Any, train: Train) -> None:
    """An epoch has 5 steps."""
    reference = train(script(make, steps=18))
    ended = train(script(make, steps=18), kill={1: after(8)})
    same_with_a_loss(ended, reference)
    each_sample_once(ended, 18)


class Refills(Vectors):
    """Whole micro-batches, for all data shards of a rank in one buffer."""

    buffer = torch.zeros(MICRO, WIDTH)

    def __iter__(self) -> Any:
        samples = super().__iter__()
        for pair in zip(samples, samples, strict=True):
            yield torch.stack(pair, out=self.buffer)


class Buffered(Refills):
    """The same, each in a buffer of its own."""

    def __iter__(self) -> Any:
        yield from map(torch.clone, super().__iter__())


def test_one_buffer_for_all_micro_batches_gives_each_its_own_data(train: Train) -> None:
    reference = train(script(Buffered, batched=True), spares=0)
    ended = train(script(Refills, batched=True), spares=0)
    each_sample_once(ended)
    assert ended.losses == reference.losses


def test_an_order_that_depends_on_how_often_it_was_made_is_found_when_the_first_epoch_ends(train: Train) -> None:
    made: dict[tuple[int, int], int] = {}

    class Another(Vectors):
        def __init__(self, shard: int, shards: int) -> None:
            super().__init__(shard, shards)
            self._seed = made[os.getpid(), shard] = made.get((os.getpid(), shard), -1) + 1

        def __iter__(self) -> Any:
            self._epoch = self._seed
            return super().__iter__()

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "seed": self._seed}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            self._seed = state["seed"]

    ended = train(script(Another, state_every=2), spares=0)
    assert ended.exit_code == 1, ended
    assert "does not give the same samples when it is read again from its own state_dict()" in ended.because
    assert max(ended.losses) == 4


def test_it_is_the_training_of_one_process(train: Train) -> None:
    one, three = (train(script(), ranks=ranks, spares=0, reduction="exact") for ranks in (1, 3))
    assert {at: gate[0] for at, gate in one.gates.items()} == {at: gate[0] for at, gate in three.gates.items()}
    each_sample_once(one)


def test_a_rank_that_is_lost_before_any_state_was_recorded(train: Train) -> None:
    reference = train(script(steps=4, state_every=100))
    ended = train(script(steps=4, state_every=100), kill={1: after(2)})
    same_with_a_loss(ended, reference)
    each_sample_once(ended, 4)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.stories) for seed in range(2, 6))])
def test_sharded_ranks_go_back_to_a_snapshot_and_read_the_same_samples_again(seed: int, train: Train) -> None:
    make = script(model_of=sharded)
    reference = train(make, snapshot_every=5, reduction="none")
    ended = train(make, kill={seed % 3: moments(reference, seed % 3, seed)[0]}, snapshot_every=5, reduction="none")
    same_with_a_loss(ended, reference)
    each_sample_once(ended)


@pytest.mark.feature("Streams", "a smaller world")
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.stories) for seed in range(2, 6))])
def test_without_spares_the_others_read_the_lost_ranks_data_shards(seed: int, train: Train) -> None:
    reference = train(script(), spares=0, reduction="exact")
    kill = {rank: moments(reference, rank, seed)[0] for rank in ((0, 2) if seed % 2 else (1,))}
    ended = train(script(), kill=kill, reduction="exact", **SHRINK)
    assert {at: gate[:3] for at, gate in ended.gates.items()} == {at: g[:3] for at, g in reference.gates.items()}, ended
    each_sample_once(ended)
    assert min(plan.world_size for plan in ended.plans) < 3, ended


@pytest.mark.feature("Streams", "a world that grows")
@pytest.mark.parametrize("model_of", [sharded, *in_stories(replicated)])
def test_a_rank_that_comes_back_reads_its_data_shards_on(model_of: Any, train: Train, tmp_path: Path) -> None:
    mark, steps = tmp_path / "ready", 24

    def before(run: Run, step: int) -> None:
        while step == 12 and run.world_size < 3 and not mark.exists() and not run._world.broken:
            time.sleep(0.001)

    make = script(model_of=model_of, before=before, steps=steps)
    reference = train(script(model_of=model_of, steps=steps), spares=0, reduction="exact")
    each_sample_once(reference, steps)
    ended = train(make, kill={2: after(6)}, reduction="exact", mark=mark, snapshot_every=2, **SHRINK)
    assert {at: gate[:3] for at, gate in ended.gates.items()} == {at: g[:3] for at, g in reference.gates.items()}, ended
    assert {plan.world_size for plan in ended.plans} == {2, 3}, ended


def test_a_smaller_batch_leaves_data_shards_where_they_are(train: Train) -> None:
    how = {"batch": BATCH, "scale": ScaleLR("sqrt"), "reduction": "exact"}
    ended = train(script(), kill={1: after(5)}, **how, **SHRINK)
    assert ended.exit_code == 0, ended
    assert ended.plans[0].world_size == 2, ended  # it may grow again before its end
    read: dict[int, list[int]] = {}
    for where in sorted(ended.ids):
        for sample in ended.samples(where):
            read.setdefault(sample % SHARDS, []).append(sample // SHARDS)
    assert all(found == list(range(len(found))) for found in read.values()), "no sample is left out or used twice"
    assert len(read[0]) > len(read[SHARDS - 1]) > 0


def test_a_rank_that_is_slow_gives_its_data_shards_to_others(train: Train) -> None:
    slow = {Position(4): {1: 2.0}}
    reference = train(script(), reduction="exact")
    ended = train(script(), slow=slow, reduction="exact")
    assert ended.losses == reference.losses, ended
    each_sample_once(ended)
    shares = {len(ids) for at, by_rank in ended.ids.items() for ids in by_rank.values()}
    assert shares != {len(ids) for at, by_rank in reference.ids.items() for ids in by_rank.values()}


def test_a_planned_swap_reads_on_where_the_other_was(train: Train) -> None:
    reference = train(script())
    ended = train(script(), swap=Swap(Position(6), lost=1))
    same_with_a_loss(ended, reference)
    each_sample_once(ended)


@pytest.mark.feature("Streams", "a job that goes on from --checkpoint-dir, on any number of ranks")
@pytest.mark.parametrize("ranks", [3, *in_stories(2)])
@pytest.mark.parametrize("model_of", [sharded, *in_stories(replicated)])
def test_a_job_goes_on_from_a_checkpoint_on_any_number_of_ranks(
    model_of: Any, ranks: int, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = train(script(model_of=model_of), reduction="exact")
    monkeypatch.setenv("RACKRUN_CHECKPOINT_DIR", str(tmp_path))
    monkeypatch.setenv("RACKRUN_CHECKPOINT_EVERY", "2")
    first = train(script(model_of=model_of, steps=7), spares=0, reduction="exact")
    assert first.exit_code == 0, first
    ended = train(script(model_of=model_of), ranks=ranks, spares=0, reduction="exact")
    assert ended.exit_code == 0, ended
    assert {**first.losses, **ended.losses} == reference.losses, ended
    assert min(ended.losses) == 7, ended
    assert {at.step: ended.samples(at) for at in ended.ids} == {n: ids_of(n) for n in range(7, STEPS)}


def test_data_that_have_changed_before_a_job_goes_on_are_found(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RACKRUN_CHECKPOINT_DIR", str(tmp_path))
    monkeypatch.setenv("RACKRUN_CHECKPOINT_EVERY", "2")
    assert train(script(steps=9), spares=0).exit_code == 0
    ended = train(script(lambda shard, shards: Vectors(shard, shards, count=54)), spares=0)
    assert ended.exit_code == 1, ended
    assert "is not the one that was trained on" in ended.because


def test_a_job_that_goes_on_with_another_number_of_streams_is_refused(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RACKRUN_CHECKPOINT_DIR", str(tmp_path))
    monkeypatch.setenv("RACKRUN_CHECKPOINT_EVERY", "2")
    assert train(script(steps=3), ranks=1, spares=0).exit_code == 0

    def main(run: Run) -> None:
        run.stream(Vectors)
        script()(run)

    ended = train(main, ranks=1, spares=0)
    assert ended.exit_code == 1, ended
    assert "has read 1 stream(s) in 6 data shards" in ended.because
    assert "this script reads 2" in ended.because


class Lines(IterableDataset[Any]):
    def __init__(self, shard: int, shards: int) -> None:
        self._vectors = Vectors(shard, shards)

    def __iter__(self) -> Any:
        worker: Any = torch.utils.data.get_worker_info()
        return itertools.islice(self._vectors, worker.id, None, worker.num_workers)


@pytest.mark.frameworks
def test_streams_with_processes_of_their_own_leave_none_behind(train: Train) -> None:
    """The check around each test looks for them."""

    def loaded(shard: int, shards: int) -> Any:
        return DataLoader(Lines(shard, shards), num_workers=2, batch_size=MICRO)

    reference = train(script(loaded, batched=True))
    each_sample_once(reference)
    ended = train(script(loaded, batched=True), kill={1: after(6)})
    same_with_a_loss(ended, reference)


def test_a_spare_reads_one_micro_batch_while_it_waits_and_keeps_nothing_open(train: Train) -> None:
    def main(run: Run) -> None:
        made: list[int] = []

        def make(shard: int, shards: int) -> Any:
            made.append(shard)
            return Vectors(shard, shards)

        model = replicated(run)
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data = run.stream(make)

        @run.step
        def step(step: Step) -> None:
            for batch in data:
                step.backward(loss_of(model, batch))
            if run._units.waiting_spare:
                made.append(-1)
            optimizer.step()
            optimizer.zero_grad()

        for number in run.steps(5):
            if run.rank == 1 and number == 3 and run.generation == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            step(number)
        say(made=made, open=list(data._readers))

    ended = train(main)
    assert ended.exit_code == 0, ended
    newcomer = ended.said[1]["made"]
    assert newcomer.index(-1) == 1, "one data shard, for the trial"
    assert sorted(newcomer[2:]) == [2, 3], "two, for the step that was broken"
    assert ended.said[0]["open"] == [0, 1]


def test_whoever_opens_a_data_shard_may_take_as_long_as_a_first_step(train: Train) -> None:
    def main(run: Run) -> None:
        limits: dict[str, list[int]] = {"make": [], "load": [], "first": [], "read": []}

        def note(when: str) -> None:
            if run.generation > 1 and not run._units.waiting_spare:
                limits[when].append(run._runtime.page.deadline_ms)

        class Noted(Vectors):
            def __init__(self, shard: int, shards: int) -> None:
                note("make")
                super().__init__(shard, shards, 600)

            def load_state_dict(self, state: dict[str, Any]) -> None:
                note("load")
                super().load_state_dict(state)

            def __iter__(self) -> Any:
                for place, sample in enumerate(super().__iter__()):
                    note("read" if place > 20 else "first")
                    yield sample

        script(Noted, steps=30)(run)
        say(**limits)

    ended = train(main, kill={1: after(14)})
    assert ended.exit_code == 0, ended
    assert ended.plans, "nobody was lost"
    newcomer = ended.said[1]
    assert len(newcomer["load"]) >= 2
    assert min(newcomer["make"] + newcomer["load"] + newcomer["first"][:1]) >= 600_000
    assert 0 < max(newcomer["read"]) < 600_000


@pytest.mark.parametrize("how", ["raises", "leaves a stream half read"])
def test_a_trial_that_does_not_read_a_stream_to_its_end_leaves_nothing_open(
    how: str, train: Train, tmp_path: Path
) -> None:
    """The newcomer takes a rank over in the very first step, after its trial."""
    tried = tmp_path / "tried"

    def main(run: Run) -> None:
        model = replicated(run)
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data, other = run.stream(Vectors), run.stream(Vectors)
        held: list[Any] = []

        @run.step
        def step(step: Step) -> None:
            one, two = iter(data), iter(other)
            if run._units.waiting_spare:
                held.extend([one, two])  # as a frame in a cycle does
                tried.touch()
            for batch, more in zip(one, two, strict=False):
                if how == "raises" and run._units.waiting_spare:
                    raise RuntimeError("values of a trial do not fit")
                step.backward(loss_of(model, batch + more))
            optimizer.step()
            optimizer.zero_grad()

        for number in run.steps(3):
            if run.rank == 1 and not number and run.generation == 1:
                while not tried.exists():
                    time.sleep(0.001)
                os.kill(os.getpid(), signal.SIGKILL)
            if held:
                assert not data._readers or number
                assert not other._readers or number
            step(number)
        say(took_over=bool(held))

    ended = train(main, start_over=True)
    assert ended.exit_code == 0, ended
    assert ended.said[1]["took_over"], ended


def test_a_state_that_is_wrong_only_later_is_found_before_anybody_is_lost(train: Train) -> None:
    ended = train(script(Forgets, state_every=3), spares=0)
    assert ended.exit_code == 1, ended
    assert "does not give the same samples when it is read again from its own state_dict()" in ended.because
    assert max(ended.losses) == 4


@pytest.mark.parametrize("how", ["in its state", "in its seed"])
def test_a_stream_that_is_another_when_it_is_read_again_is_refused_in_the_first_step(how: str, train: Train) -> None:
    class Another(Vectors):
        def __iter__(self) -> Any:
            self._epoch = os.getpid() + id(self)
            return super().__iter__()

    ended = train(script(Shuffled2 if how == "in its state" else Another), spares=0)
    assert ended.exit_code == 1, ended
    assert "does not give the same samples when it is read again" in ended.because
    assert not ended.losses


class Shuffled2(Shuffled):
    sample = Vectors.sample


def test_a_shuffle_buffer_that_is_not_in_the_state_works_without_the_state(train: Train) -> None:
    reference = train(script(Shuffled2, state_every=0))
    ended = train(script(Shuffled2, state_every=0), kill={1: after(9)})
    same_with_a_loss(ended, reference)
    each_sample_once(ended)


def test_two_streams_in_steps_in_turns(train: Train) -> None:
    """Each goes on where it was when it was read last."""

    def main(run: Run) -> None:
        model = replicated(run)
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        often, seldom = run.stream(Vectors, state_every=2), run.stream(Vectors, state_every=2)

        @run.step
        def step(step: Step) -> None:
            for batch in seldom if int(step) % 3 == 2 else often:
                step.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()

        for number in run.steps(STEPS):
            step(number)

    reference = train(main)
    for step in range(STEPS):
        turn, number = (step // 3, 1) if step % 3 == 2 else (step - step // 3, 0)
        assert reference.samples(Position(step)) == [one + (number << 48) for one in ids_of(turn)]
    for rank in range(3):
        ended = train(main, kill={rank: after(8)})
        same_with_a_loss(ended, reference)


@pytest.mark.parametrize("every", [4, 1000], ids=["due for the other one", "due for none"])
@pytest.mark.parametrize("at", [3, 5])
def test_ranks_that_do_not_read_the_same_streams_are_refused_at_once(at: int, every: int, train: Train) -> None:
    def main(run: Run) -> None:
        model = replicated(run)
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data, other = run.stream(Vectors, state_every=1000), run.stream(Vectors, state_every=every)

        @run.step
        def step(step: Step) -> None:
            if run.rank or int(step) != at:
                list(other)
            for batch in data:
                step.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()

        for number in run.steps(8):
            step(number)

    ended = train(main, spares=0)
    assert ended.exit_code == 1, ended
    said = "do not read the same streams" if (at, every) == (3, 4) else "did not call the same collectives"
    assert said in ended.because, ended
    assert max(ended.losses) == at - 1


@pytest.mark.parametrize(
    ("stream", "because"),
    [
        (lambda run: run.stream([1, 2]), r"needs a function of \(shard, shards\), not a list"),
        (lambda run: run.stream(Vectors, state_every=-1), "state_every=-1 is negative"),
    ],
)
def test_what_cannot_be_a_stream_is_refused(stream: Any, because: str, train: Train) -> None:
    ended = train(stream, ranks=1, spares=0)
    assert ended.exit_code == 1, ended
    assert re.search(because, ended.because), ended


def test_a_stream_is_not_read_in_a_phase(train: Train) -> None:
    def main(run: Run) -> None:
        model = replicated(run)
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data = run.stream(Vectors)
        run.at_end(lambda: list(data))

        @run.step
        def step(step: Step) -> None:
            for batch in data:
                step.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()

        for number in run.steps(2):
            step(number)

    ended = train(main, ranks=1, spares=0)
    assert ended.exit_code == 1, ended
    assert "run.stream was read in a phase" in ended.because
