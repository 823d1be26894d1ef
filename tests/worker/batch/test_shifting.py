"""A slow rank gets fewer micro-batches: all ranks change at one step, and with the exact reduction no bit of the training does."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from rackrun.errors import StepError
from rackrun.protocol.ids import Position
from rackrun.worker.batch.microbatch_collectives import MicrobatchCollectives
from rackrun.worker.batch.share_changes import ShareChanges
from rackrun.worker.data.loader import BatchPlan, Shard
from rackrun.worker.loop.run import Run
from tests.worker.harness import Ended, TinyCluster, moments
from tests.worker.scripts import Script, adam, ddp, fit, fully_sharded, net

Train = Callable[..., Ended]

STEPS = 9
SLOW = 1
EVEN, SHIFTED = {0: 4, 1: 4, 2: 4}, {0: 6, 1: 2, 2: 4}
"""Samples of each rank: of six micro-batches of two."""
FOUND, RECOVERED = Position(2), Position(5)


def script(*, shifts: bool = True, norm: bool = False, workers: int = 0) -> Script:
    """After the steps 2 and 5 each rank waits until it has been told how the micro-batches are shared out from now on."""

    def main(run: Run) -> None:
        world = run._world

        def wait(step: int) -> None:
            if shifts and step in (FOUND.step + 1, RECOVERED.step + 1):
                while run.generation == 1 and not world.share_changes.has_next and not world.broken:
                    time.sleep(0.001)

        model = ddp(run, *([nn.BatchNorm1d(14)] if norm else []))
        fit(run, model, adam(model), steps=STEPS, before=wait, workers=workers)

    return main


@functools.cache
def undisturbed() -> Ended:
    return TinyCluster(script(shifts=False), spares=0, reduction="exact").run()


def counts(ended: Ended) -> list[dict[int, int]]:
    """Of each step: rank -> how many samples it had."""
    return [{rank: len(ids) for rank, ids in ended.ids[Position(step)].items()} for step in range(STEPS)]


SLOW_FOR_A_WHILE = {FOUND: {SLOW: 3.0}, RECOVERED: {}}


@pytest.mark.parametrize("workers", [0, 1])
def test_all_change_after_the_gate_in_which_all_have_heard_of_it_and_nobody_stands_still(
    workers: int, train: Train
) -> None:
    ended = train(script(workers=workers), spares=0, reduction="exact", slow=SLOW_FOR_A_WHILE)
    assert not ended.differences(undisturbed()), ended
    assert counts(ended) == [EVEN] * 4 + [SHIFTED] * 3 + [EVEN] * 2
    assert not ended.plans


@pytest.mark.parametrize("dies", [0, SLOW, 2])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.stories) for seed in (1, 2))])
def test_whoever_dies_whenever_all_have_the_same_shares(dies: int, seed: int, train: Train) -> None:
    how: dict[str, Any] = {"reduction": "exact", "slow": SLOW_FOR_A_WHILE}
    lived = shifted()
    (moment,) = moments(lived, dies, seed)
    ended = train(script(), kill={dies: moment}, **how)
    assert not ended.differences(undisturbed()), ended
    (plan,) = ended.plans
    if dies == SLOW:
        assert plan.shares == ()


@functools.cache
def shifted() -> Ended:
    return TinyCluster(script(), spares=0, reduction="exact", slow=SLOW_FOR_A_WHILE).run()


def test_ranks_that_share_their_samples_have_one_share(train: Train) -> None:
    """Ranks 0 and 1 differ only along tp."""

    def main(run: Run) -> None:
        world = run._world

        def wait(step: int) -> None:
            while step == FOUND.step + 1 and not world.share_changes.has_next:
                time.sleep(0.001)

        model = DDP(net(), process_group=run.mesh.get_group("dp"))
        fit(run, model, adam(model), steps=6, before=wait)

    ended = train(main, ranks=4, spares=0, mesh={"dp": 2, "tp": 2}, slow={FOUND: {SLOW: 3.0}})
    assert ended.exit_code == 0, ended
    shares = [{rank: len(ids) for rank, ids in ended.ids[Position(step)].items()} for step in (3, 4)]
    assert shares == [{0: 6, 1: 6, 2: 6, 3: 6}, {0: 2, 1: 2, 2: 10, 3: 10}]
    assert not ended.plans


def test_ddp_meets_once_a_step_also_where_it_has_buffers(train: Train) -> None:
    assert not train(script(shifts=False, norm=True), spares=0).met


def test_sharded_ranks_meet_in_every_micro_batch(train: Train) -> None:
    def main(run: Run) -> None:
        model = fully_sharded(net())
        fit(run, model, adam(model), steps=2)

    assert train(main, spares=0).met == {0, 1, 2}


# -- one rank's part ---------------------------------------------------------------------------------------------------
def test_a_deal_takes_effect_between_two_units_when_all_have_agreed() -> None:
    deals = ShareChanges()
    deals.receive(1, (3, 1))
    assert deals.has_next
    deals.take_effect()
    assert not deals.shares, "others have not heard of it"
    deals.agree()
    assert (deals.shares, deals.has_next) == ((), False)
    deals.take_effect()
    assert deals.shares == (3, 1)


def test_deals_are_agreed_on_in_their_order() -> None:
    deals = ShareChanges()
    deals.receive(2, (2, 2))
    assert not deals.has_next
    deals.receive(1, (3, 1))
    for _ in range(2):
        assert deals.has_next
        deals.agree()
    deals.take_effect()
    assert deals.shares == (2, 2)


def test_a_generation_begins_with_its_plans_shares_and_forgets_what_was_told_before() -> None:
    deals = ShareChanges()
    deals.receive(1, (3, 1))
    deals.agree()
    deals.begin((1, 3))
    deals.take_effect()
    assert (deals.shares, deals.has_next) == ((1, 3), False)


@pytest.mark.parametrize("shares", [(3, 1, 2, 2), (1, 1, 5, 1)])
def test_shares_are_contiguous_and_complete_and_need_no_ghosts(shares: tuple[int, ...]) -> None:
    plan = BatchPlan(16, 2, 0)
    dealt = [plan.shards_of(rank, 4, shares=shares) for rank in range(4)]
    assert [len(one) for one in dealt] == list(shares)
    assert [shard for one in dealt for shard in one] == [Shard(index) for index in range(8)]


def met(*calls: tuple[str, tuple[int, ...]], axes: Any = (), passes: int = 3, at: int = 2) -> bool:
    """Whether a step in which these are called in pass ``at`` of so many is one in which ranks meet."""
    meetings = MicrobatchCollectives(axes, 4)
    meetings.begin_unit()
    for number in range(1, passes + 1):
        meetings.begin_microbatch(last=number == passes)
        for name, ranks in calls if number == at else ():
            if meetings.checks:
                meetings.check_collective(name, ranks, uneven=False)
    meetings.stop()
    return meetings.detected


def test_what_is_called_in_the_last_micro_batch_all_call_once() -> None:
    assert not met(("allreduce", (0, 1, 2, 3)), at=3)


def test_a_collective_in_any_other_is_a_meeting() -> None:
    assert met(("allreduce", (0, 1, 2, 3)))
    assert met(("_allgather_base", (0, 1, 2, 3)), at=1, passes=2)


def test_the_broadcast_of_buffers_in_the_first_is_none() -> None:
    assert not met(("broadcast", (0, 1, 2, 3)), at=1)
    assert met(("broadcast", (0, 1, 2, 3)), at=2)


def test_ranks_that_share_their_samples_may_meet() -> None:
    axes = (("dp", 2), ("tp", 2))
    assert not met(("allreduce", (2, 3)), axes=axes)
    assert met(("allreduce", (0, 2)), axes=axes)


def test_to_meet_while_shares_differ_is_refused_before_anybody_waits() -> None:
    meetings = MicrobatchCollectives()
    meetings.begin_unit()
    meetings.begin_microbatch(last=False)
    with pytest.raises(StepError, match="a slow rank has fewer"):
        meetings.check_collective("allreduce", (0, 1), uneven=True)
