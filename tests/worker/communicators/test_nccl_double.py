"""The double of NCCL's contract does what NCCL does, and jobs whose collectives are only enqueued end with the bits of others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.fsdp import fully_shard

from rackrun.worker.loop.run import Run
from rackrun.worker.steps.step import Step
from tests.worker.harness import Ended, say
from tests.worker.nccl_double import MODES, Double, InStream, Stream
from tests.worker.scripts import STEPS, Samples, adam, ddp, fit, loss_of, net

Train = Callable[..., Ended]


LONG = timedelta(minutes=30)  # torch's default


def of_two(mode: str, body: Callable[[Double, Stream, int], Any]) -> list[Any]:
    """``body`` on two ranks, each with a stream of its own."""
    store, found = dist.HashStore(), [None, None]

    def rank(index: int) -> None:
        inner = dist.ProcessGroupGloo(dist.PrefixStore(mode, store), index, 2, LONG)
        stream = Stream()
        double = Double(inner, stream, mode)
        found[index] = body(double, stream, index)
        double.close()

    threads = [threading.Thread(target=rank, args=[index]) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return found


def summed(*, asynchronous: bool) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.asyncOp = asynchronous
    return options


@pytest.mark.parametrize("mode", MODES)
def test_a_call_only_enqueues_and_what_follows_in_the_stream_has_its_result(mode: str) -> None:
    def body(double: Double, stream: Stream, index: int) -> Any:
        tensor = torch.full((3,), index + 1.0)
        nothing = double.call("allreduce", [tensor], summed(asynchronous=False))
        other = torch.ones(3)
        work = double.call("allreduce", [other], summed(asynchronous=True))
        assert work is not None
        passed = stream.mark()
        early = bool(work.wait()), passed()
        with InStream(stream):
            return nothing, early, (tensor + 0).tolist(), (other + 0).tolist(), passed()

    for nothing, early, first, second, late in of_two(mode, body):
        assert nothing is None
        assert early == (True, False), "a wait is the stream's"
        assert first == [3.0] * 3
        assert second == [2.0] * 3
        assert late


def test_what_a_break_leaves_is_garbage_and_no_error() -> None:
    store = dist.HashStore()
    stream = Stream()
    double = Double(dist.ProcessGroupGloo(store, 0, 1, LONG), stream, "late")
    double.abort()
    tensor = torch.ones(3)
    work = double.call("allreduce", [tensor], summed(asynchronous=True))
    assert work is not None
    assert work.wait()
    with InStream(stream):
        assert (tensor + 0).isnan().all()
    double.close()


def test_a_break_ends_a_send_of_which_gloo_lost_the_wake_up() -> None:
    """Else the device would seem to hang, and its rank would give its place up."""

    awaited, woken = threading.Event(), threading.Event()

    class Sent:
        def wait(self) -> bool:
            awaited.set()
            return woken.wait()

    class Inner:
        def send(self, *_: Any) -> Sent:
            return Sent()

    stream = Stream()
    double = Double(Inner(), stream, "stuck")
    work = double.call("send", [torch.ones(3)], 1, 0)
    assert work is not None
    assert awaited.wait(30)
    double.abort()
    assert work.over.wait(30)
    woken.set()
    double.close()


def test_there_is_no_receive_from_any_source() -> None:
    double = Double(dist.ProcessGroupGloo(dist.HashStore(), 0, 1, LONG), Stream(), "late")
    with pytest.raises(NotImplementedError):
        double.call("recv_anysource", [torch.ones(1)], 0)
    double.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("killed", ["enters a collective after Position(step=4", "passed the gate of Position(step=4"])
def test_a_rank_is_lost_and_the_bits_are_those_of_a_job_on_hosts(
    killed: str, mode: str, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(run: Run) -> None:
        model = ddp(run)
        fit(run, model, adam(model))

    undisturbed = train(main)
    monkeypatch.setenv("RACKRUN_NCCL_DOUBLE", mode)
    ended = train(main, kill={1: killed})
    assert len(ended.plans) == 1, ended
    assert not ended.differences(undisturbed), ended


def test_a_lost_shard_is_computed_again_in_fsdps_own_order(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for collectives by itself, in operations of DTensors."""

    def main(run: Run) -> None:
        model = net()
        fully_shard(model)
        fit(run, model, adam(model))

    undisturbed = train(main)
    monkeypatch.setenv("RACKRUN_NCCL_DOUBLE", "stuck")
    ended = train(main, kill={1: "enters a collective after Position(step=4"})
    assert len(ended.plans) == 1, ended
    assert not ended.differences(undisturbed), ended


LARGE = 2**21
"""Elements: more than a socket holds, so that a send ends only when its peer receives."""


def ring(run: Run) -> None:
    """Ring attention's exchange, in each step: every rank sends to the next before it receives from the one before."""
    model = ddp(run)
    optimizer = adam(model)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(Samples())
    received: dict[int, float] = {}

    @run.step
    def step(step: Step) -> None:
        mine = torch.full((LARGE,), float(run.rank + int(step)))
        theirs = torch.empty(LARGE)
        following, before = (run.rank + 1) % run.world_size, (run.rank - 1) % run.world_size
        operations = [dist.P2POp(dist.isend, mine, following), dist.P2POp(dist.irecv, theirs, before)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        received[int(step)] = float(theirs.mean())
        for batch in data:
            step.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()

    for number in run.steps(STEPS):
        step(number)
    say(received=received, rank=run.rank, size=run.world_size)


@pytest.mark.parametrize("killed", [None, "enters a collective after Position(step=4"])
@pytest.mark.parametrize(
    "mode", [None, MODES[0], *(pytest.param(mode, marks=pytest.mark.stories) for mode in MODES[1:])]
)
def test_sends_and_receives_of_a_batch_do_not_wait_for_each_other(
    mode: str | None, killed: str | None, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one, all ranks would send, and nobody receive."""
    if mode is not None:
        monkeypatch.setenv("RACKRUN_NCCL_DOUBLE", mode)
    ended = train(ring, kill={1: killed} if killed else {})
    assert ended.exit_code == 0, ended
    assert len(ended.plans) == bool(killed)
    for said in ended.said.values():
        before = (said["rank"] - 1) % said["size"]
        assert said["received"] == {step: before + int(step) for step in said["received"]}
        assert str(STEPS - 1) in said["received"]


def objects_and_checkpoints(folder: Path) -> Callable[[Run], None]:
    """What goes over the hosts' half: objects, a barrier, tensors of the host, and an asynchronous checkpoint of torch's own."""

    def main(run: Run) -> None:
        model = ddp(run)

        def after(step: int) -> None:
            gathered: list[Any] = [None] * run.world_size
            dist.all_gather_object(gathered, (run.rank, step))
            named = ["from rank 0" if run.rank == 0 else None]
            dist.broadcast_object_list(named, src=0)
            dist.barrier()
            say(gathered=list(map(list, gathered)), named=named)

        def save() -> None:
            saving: Any = checkpoint.async_save({"model": model.state_dict()}, checkpoint_id=folder / "saved")
            saving.result()

        run.at_end(save)
        fit(run, model, adam(model), after=after)

    return main


@pytest.mark.parametrize("mode", [None, *MODES])
def test_objects_and_asynchronous_checkpoints(
    mode: str | None, train: Train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if mode is not None:
        monkeypatch.setenv("RACKRUN_NCCL_DOUBLE", mode)
    ended = train(objects_and_checkpoints(tmp_path), kill={1: "enters a collective after Position(step=4"})
    assert ended.exit_code == 0, ended
    for said in ended.said.values():
        assert said["named"] == ["from rank 0"]
        assert said["gathered"] == [[rank, STEPS - 1] for rank in range(3)]
    assert (tmp_path / "saved" / ".metadata").exists()


def coalesced(run: Run) -> None:
    """As a distributed optimizer of the script's own reduces and gathers: all its buffers in one call."""
    model = ddp(run)
    rows = torch.arange(2.0 * run.world_size) + run.rank

    def after(step: int) -> None:
        sums = [torch.full((size,), 1.0 + run.rank) for size in (3, 5)]
        parts, wholes = [torch.empty(2) for _ in range(2)], [torch.empty(2 * run.world_size) for _ in range(2)]
        with dist._coalescing_manager(device=run.device, async_ops=True) as works:
            for tensor in sums:
                dist.all_reduce(tensor)
        works.wait()
        with dist._coalescing_manager(device=run.device):
            for part in parts:
                dist.reduce_scatter_tensor(part, rows)
        with dist._coalescing_manager(device=run.device):
            for whole, part in zip(wholes, parts, strict=True):
                dist.all_gather_into_tensor(whole, part)
        say(sums=[tensor.tolist() for tensor in sums], wholes=[tensor.tolist() for tensor in wholes])

    fit(run, model, adam(model), after=after)


@pytest.mark.parametrize("mode", [None, *MODES])
def test_a_coalescing_manager_gives_what_its_collectives_would(
    mode: str | None, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode is not None:
        monkeypatch.setenv("RACKRUN_NCCL_DOUBLE", mode)
    ended = train(coalesced, kill={1: "enters a collective after Position(step=4"})
    assert ended.exit_code == 0, ended
    for said in ended.said.values():
        assert said["sums"] == [[6.0] * 3, [6.0] * 5]
        assert said["wholes"] == [[3.0 * place + 3 for place in range(6)]] * 2


def test_a_phase_left_inside_of_a_coalescing_manager_is_done_again_whole(train: Train) -> None:
    """torch's manager does not see that it is left: collectives after it would only be written down."""

    def main(run: Run) -> None:
        model = ddp(run)

        def phase() -> None:
            total, each = torch.ones(1), [torch.zeros(1) for _ in range(run.world_size)]
            dist.all_reduce(total)
            with dist._coalescing_manager(device=run.device):
                dist.all_gather(each, total)
            say(total=total.item(), each=[tensor.item() for tensor in each])

        run.every(4, phase)
        fit(run, model, adam(model))

    reference = train(main)
    lived = reference.moments[1]
    enters = [i for i, what in enumerate(lived) if what.startswith("enters a collective after Position(step=3")]
    ended = train(main, kill={1: enters[1]})
    assert not ended.differences(reference), f"{lived[enters[0] : enters[1] + 3]}\n{ended}"
    assert all(said == {"total": 3.0, "each": [3.0] * 3} for said in ended.said.values()), ended
    assert ended.plans, f"nobody died\n{ended}"
