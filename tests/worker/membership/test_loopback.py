"""Collectives of a group that is not joined, or broken: every peer equals me, and nothing is left uninitialised."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from rackrun.protocol.ids import Generation
from rackrun.worker.loop.run import Run
from rackrun.worker.membership.collective_work import GuardedWork
from rackrun.worker.membership.elastic_group import ElasticGroup
from rackrun.worker.membership.worker_membership import WorkerMembership
from rackrun.worker.torch_compat.data_parallel.ddp import reset
from tests.worker import harness
from tests.worker.harness import say
from tests.worker.scripts import adam, ddp

SIZE, RANK = 3, 1
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


@pytest.fixture
def group(world: WorkerMembership) -> ElasticGroup:
    return world.create_default(RANK, SIZE)


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def junk(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What torch.empty may hold at worst."""
    return torch.full(shape, 99, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_output_is_what_an_equal_peer_would_give(group: ElasticGroup, dtype: torch.dtype) -> None:
    one, three = ones(4, dtype=dtype), ones(4, dtype=dtype) * SIZE
    for operation in (group.allreduce, group.allreduce_coalesced, group.reduce):
        tensors = [ones(4, dtype=dtype)]
        operation(tensors).wait()
        assert torch.equal(tensors[0], three.to(dtype))

    for gather in (group.all_gather_single, group._allgather_base):
        output = junk(12, dtype=dtype)
        gather(output, one).wait()
        assert torch.equal(output, ones(12, dtype=dtype))
    rows = [[junk(4, dtype=dtype) for _ in range(SIZE)]]
    group.allgather(rows, [one]).wait()
    assert all(torch.equal(row, one) for row in rows[0])

    for scatter in (group.reduce_scatter_single, group._reduce_scatter_base):
        output = junk(4, dtype=dtype)
        scatter(output, ones(12, dtype=dtype)).wait()
        assert torch.equal(output, three.to(dtype))
    output = junk(4, dtype=dtype)
    group.reduce_scatter([output], [[one] * SIZE]).wait()
    assert torch.equal(output, three.to(dtype))

    for exchange in (group.all_to_all_single, group.alltoall_base):
        output = junk(6, dtype=dtype)
        exchange(output, ones(6, dtype=dtype), [], []).wait()
        assert torch.equal(output, ones(6, dtype=dtype))
    outputs = [junk(4, dtype=dtype) for _ in range(SIZE)]
    group.alltoall(outputs, [one] * SIZE).wait()
    assert all(torch.equal(output, one) for output in outputs)

    output = junk(4, dtype=dtype)
    group.scatter([output], [[one] * SIZE]).wait()
    assert torch.equal(output, one)


def test_an_all_to_all_of_uneven_splits_leaves_nothing_uninitialised(group: ElasticGroup) -> None:
    output = junk(5)
    group.all_to_all_single(output, ones(6), [1, 2, 2], [2, 2, 2]).wait()
    assert output.max() <= 1


def test_what_is_received_is_zero(group: ElasticGroup) -> None:
    for receive in (lambda t: group.recv(t, 0), group.recv_anysource):
        tensors = [junk(4)]
        receive(tensors).wait()
        assert torch.equal(tensors[0], torch.zeros(4))


def test_output_and_input_may_overlap(group: ElasticGroup) -> None:
    """FSDP gathers in place: its shard is a part of what is gathered."""
    whole = torch.arange(12.0)
    group.all_gather_single(whole, whole[4:8]).wait()
    assert torch.equal(whole, torch.arange(4.0, 8.0).repeat(3))
    whole = torch.arange(12.0)
    group.reduce_scatter_single(whole[:4], whole).wait()
    assert torch.equal(whole[:4], torch.arange(4.0, 8.0) * SIZE)


@pytest.mark.parametrize("op", [dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.AVG, dist.ReduceOp.BAND])
def test_reductions_that_keep_equal_values_keep_them(group: ElasticGroup, op: dist.ReduceOp.RedOpType) -> None:
    options = dist.AllreduceOptions()
    options.reduceOp = op  # type: ignore[assignment]  # torch converts it
    tensors = [torch.tensor([3, 5])]
    group.allreduce(tensors, options).wait()
    assert tensors[0].tolist() == [3, 5]


def test_its_futures_are_done(group: ElasticGroup) -> None:
    tensors = [ones(2)]
    work = group.allreduce(tensors)
    assert work.is_completed()
    assert work.get_future().value() is tensors


class EndsWhileItIsLookedAfter(dist.Work):
    """Its first wait times out; the next thing anybody asks, it has ended."""

    def __init__(self, error: str = "") -> None:
        super().__init__()
        self.looks = 0
        self.error = error

    def is_completed(self) -> bool:
        return self.looks > 0

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.looks += 1
        if self.looks == 1:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)
        return True


@pytest.mark.parametrize("error", ["", "Connection reset by peer"])
def test_a_look_that_times_out_is_no_verdict(world: WorkerMembership, error: str) -> None:
    tensor = ones(4)
    world.machine.start_alone(Generation(1))
    work = EndsWhileItIsLookedAfter(error)
    GuardedWork(world, world.generation, work, [tensor], lambda: None, entered=world.progress.enter()).wait()
    assert work.looks == 2
    assert world.broken == bool(error)


def test_groups_of_a_promoted_spare_are_those_of_the_rank_that_it_replaces(world: WorkerMembership) -> None:
    """Two disjoint families of equal size: which one a group belongs to shows in who is not in it."""
    world.create_default(0, 4)
    made = [world.new_group(ranks, "", "undefined") for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    world.promote(3)
    rows, columns = made[0], made[2]
    assert rows is not None
    assert columns is not None
    assert (rows.ranks, rows.rank()) == ((2, 3), 1)
    assert (columns.ranks, columns.rank()) == ((1, 3), 1)
    assert rows.key == "undefined/2-3/1"


def test_objects_may_be_exchanged_before_the_first_step(train: Callable[..., harness.Ended]) -> None:
    """A spare runs the same lines, on loopbacks."""

    def main(run: Run) -> None:
        told = [{"seed": 5} if run.rank == 0 else None]
        dist.broadcast_object_list(told, src=0)
        everyone: list[object] = [None] * run.world_size
        dist.all_gather_object(everyone, {"rank": run.rank})
        seed = torch.tensor([5 if run.rank == 0 else -1])
        dist.broadcast(seed, 0)
        model = ddp(run)
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        say(told=told, everyone=everyone, seed=seed.item())

        @run.step
        def step(_: object) -> None:
            optimizer.step()

        for number in run.steps(5):
            step(number)

    ended = train(main, ranks=2)
    assert ended.exit_code == 0, ended
    assert ended.said[1] == {"told": [{"seed": 5}], "everyone": [{"rank": 0}, {"rank": 1}], "seed": 5}
    for lost in (0, 1):
        swapped = train(main, ranks=2, kill={lost: harness.moments(ended, lost, 0)[0]})
        assert swapped.exit_code == 0, swapped
        assert swapped.plans
        assert swapped.said[lost]["told"] == [{"seed": 5}], "a spare is given what rank 0 has said"
        assert swapped.said[lost]["seed"] == 5


def test_when_ddp_lays_out_its_buckets_nobody_is_asked(
    world: WorkerMembership, group: ElasticGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layout is the same on all ranks. torch would have rank 0 tell it, and raise where what comes is garbage: a rank that is lost in that would
    take another with it."""
    module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)
    entered: list[str] = []
    monkeypatch.setattr(world, "enter_collective", lambda _, name, result: entered.append(name))
    reset(module)
    assert entered == []
    group.allreduce([ones(1)]).wait()
    assert entered == ["allreduce"]
