"""A break on a device: what it leaves there looks complete. No script is given it, and nothing is done again beside it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from rackrun.errors import CollectiveBroken, StepError
from rackrun.link.heartbeat_page import HeartbeatPage
from rackrun.protocol.ids import Generation, Incarnation, SlotId
from rackrun.worker.communicators.communicator import OWN_FAULTS
from rackrun.worker.communicators.gloo import GlooCommunicator, _duplicate
from rackrun.worker.device import device_return
from rackrun.worker.device.device_queue import DeviceQueue, queue_of, wait_until
from rackrun.worker.device.device_return import RETURNS_S, DeviceReturn
from rackrun.worker.loop.run import Run
from rackrun.worker.membership import worker_membership as world_module
from rackrun.worker.membership.decisions.membership_machine import MembershipMachine
from rackrun.worker.membership.decisions.script_scope import Scope
from rackrun.worker.membership.worker_membership import WorkerMembership
from rackrun.worker.steps.step import Step
from rackrun.worker.steps.undo.unit_undo import UnitUndo
from tests.variants import in_stories
from tests.worker.harness import Ended, say
from tests.worker.nccl_double import EARLY, MODES, InStream, LateWork, Queue, Stream, stream_of
from tests.worker.scripts import Samples, adam, ddp, fit, loss_of, net

Train = Callable[..., Ended]


def synchronous(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)


def asynchronous(tensor: torch.Tensor) -> None:
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()


def by_future(tensor: torch.Tensor) -> None:
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.get_future().wait()


@pytest.mark.parametrize("mode", [MODES[0], *in_stories(*MODES[1:]), EARLY])
@pytest.mark.parametrize(
    "reduce",
    [synchronous, *(pytest.param(how, marks=pytest.mark.stories) for how in (asynchronous, by_future))],
)
def test_a_phase_whose_collective_is_aborted_does_not_give_its_script_what_that_leaves(
    reduce: Callable[[torch.Tensor], None], mode: str, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 dies as it enters the second collective of the phase: the others are in it, or come to it."""

    def main(run: Run) -> None:
        seen: list[float] = []

        def evaluate() -> None:
            for _ in range(3):
                tensor = torch.ones(4)
                reduce(tensor)
                seen.append((tensor + 0).sum().item())
                say(seen=seen)

        run.every(2, evaluate)
        model = ddp(run)
        fit(run, model, adam(model))

    undisturbed = train(main)
    monkeypatch.setenv("RACKRUN_NCCL_DOUBLE", mode)
    ended = train(main, kill={1: second_of_phase(undisturbed.moments[1])})
    assert len(ended.plans) == 1, ended
    assert not ended.differences(undisturbed), ended
    for rank in (0, 2):
        assert set(ended.said[rank]["seen"]) == {12.0}, ended.said


def test_a_script_that_refuses_what_a_broken_collective_leaves_has_no_mistake(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 dies in a step. The others have garbage for its loss, and perhaps nobody has told them yet."""

    def main(run: Run) -> None:
        model = ddp(run)
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())

        @run.step
        def step(step: Step) -> None:
            for batch in data:
                loss = loss_of(model, batch)
                step.backward(loss)
            total = loss.detach().clone()
            dist.all_reduce(total)
            if not (total + 0).isfinite().item():
                say(refused=True)
                raise FloatingPointError("the loss is not finite")
            optimizer.step()
            optimizer.zero_grad()

        for number in run.steps(6):
            step(number)

    undisturbed = train(main)
    monkeypatch.setenv("RACKRUN_NCCL_DOUBLE", EARLY)
    moments = undisturbed.moments[1]
    committed = moments.index("committed Position(step=3, phase=0)")
    of_step = [at for at, what in enumerate(moments) if at > committed and what.startswith("enters")]
    ended = train(main, kill={1: of_step[1]})  # behind the one of DDP's
    assert len(ended.plans) == 1, ended
    assert not ended.differences(undisturbed), ended
    assert any(ended.said[rank].get("refused") for rank in (0, 2)), ended.said


def second_of_phase(moments: list[str]) -> int:
    """Of the first phase: behind the collective of its step, and two of its own."""
    committed = moments.index("committed Position(step=1, phase=0)")
    return [at for at, what in enumerate(moments) if at > committed and what.startswith("enters")][1]


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_done_again_before_what_was_in_flight_is_over(
    mode: str, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(run: Run) -> None:
        stream = stream_of(run._world)
        begins: list[tuple[int, bool]] = []
        begin_unit = WorkerMembership.begin_unit

        def looked_at(world: WorkerMembership, *, phase: bool) -> None:
            begins.append((int(world.generation), stream.is_empty()))
            say(begins=begins)
            begin_unit(world, phase=phase)

        discard = UnitUndo.discard

        def undone(undo: UnitUndo, *, backward_open: bool) -> list[str]:
            if run._world.generation:
                say(undone_when_empty=stream.is_empty())
            return discard(undo, backward_open=backward_open)

        WorkerMembership.begin_unit, UnitUndo.discard = looked_at, undone  # type: ignore[method-assign,assignment]
        model = net().to(run.device)
        fit(run, model, adam(model), average=True)

    monkeypatch.setenv("RACKRUN_NCCL_DOUBLE", mode)
    ended = train(main, kill={1: "enters a collective after Position(step=4"})
    assert ended.exit_code == 0, ended
    assert len(ended.plans) == 1, ended
    for rank in (0, 2):
        again = [empty for generation, empty in ended.said[rank]["begins"] if generation > 1]
        assert again
        assert again[0], "an aborted collective was still in flight"
        # A rank that had not begun the step when rank 1 was lost has nothing to undo.
        assert ended.said[rank].get("undone_when_empty", True), "an aborted collective was still in flight"


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("future", [False, True])
def test_before_the_first_step_a_broken_collective_ends_its_script_and_gives_it_nothing(
    asynchronous: bool, future: bool, alone: WorkerMembership
) -> None:
    """The communicator is broken while the script waits; the kernel leaves, and all waits pass."""
    group = alone.groups[0]
    tensor, options = torch.ones(4), dist.AllreduceOptions()
    options.asyncOp = asynchronous
    breaks_in_it(alone)
    with InStream(stream_of(alone)):
        work = group.allreduce([tensor], options)
        with pytest.raises(CollectiveBroken, match="before the first step"):
            work.get_future() if future else work.wait()
    assert torch.equal(tensor, torch.zeros(4)), "whoever catches that is given no garbage either"


@pytest.mark.parametrize(
    ("start", "kept"),
    [
        (lambda group, tensor: group.broadcast([tensor], root(0)), True),
        (lambda group, tensor: group.broadcast([tensor], root(1)), False),
        (lambda group, tensor: group.send([tensor], 1), True),
        (lambda group, tensor: group.reduce([tensor]), False),
    ],
    ids=["source of a broadcast", "broadcast", "send", "reduce"],
)
def test_what_a_broken_collective_only_read_is_kept_and_what_it_wrote_is_zero(
    start: Callable[[Any, torch.Tensor], dist.Work], kept: bool, alone: WorkerMembership
) -> None:
    """In the first phase, in a backward pass, which cannot be left."""
    tensor = torch.ones(4)
    breaks_in_it(alone, writes=not kept)
    alone.scope, alone.in_phase, alone.may_leave_phase = Scope.UNIT, True, lambda: False
    with InStream(stream_of(alone)):
        start(alone.groups[0], tensor).wait()
    assert tensor.tolist() == [float(kept)] * 4
    assert alone.broken


def root(rank: int) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = rank
    return options


def breaks_in_it(world: WorkerMembership, *, writes: bool = True) -> None:
    """The communicator of its only group, in the first collective, beside who waits for it. ``writes``: it leaves garbage."""
    stream = stream_of(world)

    def call(_name: str, tensors: list[torch.Tensor], *args: Any, **_how: Any) -> LateWork | None:
        work = LateWork(stream, tensors, tensors)
        stream.enqueue(work.enqueued)

        def breaks() -> None:
            world.collective_failed(1, RuntimeError("broken"))
            if writes:
                tensors[0].fill_(torch.nan)
            stream.over(work.enqueued)

        threading.Thread(target=breaks).start()
        if getattr(args[-1], "asyncOp", True):
            return work
        stream.waits_for(work.enqueued)
        return None

    world.groups[0].communicator = cast("Any", SimpleNamespace(call=call, lost_a_peer=lambda: False))


@pytest.mark.parametrize("lost", [False, True])
def test_what_came_from_a_peer_that_is_gone_is_not_taken_for_good(lost: bool, alone: WorkerMembership) -> None:
    """Its kernel left, and this rank's ended as if all were well; nobody has told this rank yet."""
    alone.groups[0].communicator = cast("Any", SimpleNamespace(lost_a_peer=lambda: lost))
    over = SimpleNamespace(passed=lambda: True)
    assert alone.wait_for_event(cast("Any", over), 1) == (not lost)


@pytest.mark.parametrize("lost", [False, True])
def test_what_a_script_raises_beside_a_peer_that_is_gone_may_come_of_its_garbage(
    lost: bool, alone: WorkerMembership
) -> None:
    """Two ranks that stop at the same NaN would be taken for a mistake of the script's, and end the job."""
    alone.groups[0].communicator = cast("Any", SimpleNamespace(lost_a_peer=lambda: lost))
    assert alone.may_follow_from_break(FloatingPointError("the loss is not finite")) == lost
    assert alone.broken == lost


@pytest.mark.parametrize("error", OWN_FAULTS)
def test_a_rank_whose_own_device_cannot_build_its_groups_ends(error: type[Exception], alone: WorkerMembership) -> None:
    """No peer is missed, and whoever takes its place builds them elsewhere."""
    builder, plan = SimpleNamespace(over=True, error=error("CUDA error")), SimpleNamespace(generation=0)
    with pytest.raises(error):
        alone._build.wait(cast("Any", plan), cast("Any", builder), rank=0)
    assert alone.unreported_failure() is None, "and nobody is told of a rift"


def test_on_hosts_a_lost_peer_is_an_error_and_nobody_looks_for_it(
    alone: WorkerMembership, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alone, "queue", queue_of(torch.device("cpu")))
    alone.groups[0].communicator = cast("Any", SimpleNamespace())
    assert not alone.may_follow_from_break(ValueError())


@pytest.mark.parametrize("which", ["is broken", "ends"])
def test_a_rank_sees_that_a_peers_host_has_closed_its_connections(which: str) -> None:
    """As it does first of all when it is broken, and the system does when it ends; and not before."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(GlooCommunicator, store, rank, 2, timedelta(seconds=20)) for rank in (0, 1)]
        mine, peer = [one.result() for one in made]
    for one in (mine, peer):
        one.watch()
        assert one._watched
        assert not one.lost_a_peer()
    sums = [one.call("allreduce", [torch.ones(1)], dist.AllreduceOptions()) for one in (mine, peer)]
    for work in sums:
        work.wait()
    assert not mine.lost_a_peer()
    if which == "is broken":
        peer.break_()
    else:
        del peer.inner, peer.host, one, made, sums, work
    assert wait_until(mine.lost_a_peer, lambda: False)


def test_a_number_that_is_no_sockets_any_more_is_let_go_of(tmp_path: Path) -> None:
    """A connection was closed, and its number given to a file, between two looks."""
    with open(tmp_path / "file", "w") as file:
        before = os.listdir("/proc/self/fd")
        with pytest.raises(OSError, match="non-socket"), _duplicate(file.fileno()):
            pass
        assert os.listdir("/proc/self/fd") == before


def test_a_rank_whose_group_is_being_built_is_on_its_way(alone: WorkerMembership) -> None:
    alone.look_at_device()
    since_ns = alone.page.since_ns
    alone.look_at_device()
    assert alone.page.since_ns == since_ns
    with alone._build.handshakes.one():
        alone.look_at_device()
    assert alone.page.since_ns > since_ns


def test_a_host_that_waits_for_its_device_says_so_meanwhile(alone: WorkerMembership) -> None:
    """It polls, which is no work."""
    seen: list[int] = []

    def passed() -> bool:
        seen.append(alone.device_wait_since_ns)
        return len(seen) > 1

    place = SimpleNamespace(passed=passed)
    assert alone.wait_for_event(cast("Any", place), 1)
    assert all(seen)
    assert not alone.device_wait_since_ns


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerMembership]:
    """Of two ranks, in generation 1, on a device."""
    fd = HeartbeatPage.create("alone")
    page = HeartbeatPage(fd)
    os.close(fd)
    stream = Stream()
    monkeypatch.setattr(world_module, "queue_of", lambda _: Queue(stream))
    world = WorkerMembership(page, torch.device("cpu"), SlotId("t/0"), Incarnation(1), "")
    world.create_default(0, 2)
    world.machine.start_alone(Generation(1))
    yield world
    page.close()


# -- a device that does not come back


class Slow:
    """A device that comes back when a test says so."""

    is_host = False
    name = "GPU 3 (of a test)"

    def __init__(self) -> None:
        self.back = threading.Event()
        self.error = ""

    def use(self) -> None:
        pass

    def synchronise(self) -> None:
        self.back.wait(30)
        if self.error:
            raise RuntimeError(self.error)


class Rig:
    def __init__(self) -> None:
        self.device, self.now, self.left = Slow(), 100.0, list[tuple[int, str]]()
        self.returns = DeviceReturn(
            cast("DeviceQueue", self.device),
            lambda: 5,
            clock=lambda: self.now,
            leave=lambda *how: self.left.append(how),
        )

    def breaks(self) -> None:
        self.returns.break_begins()
        self.returns.watch_device()

    def over(self) -> None:
        """Its thread has ended."""
        for thread in threading.enumerate():
            if thread.name == "rackrun-device-return":
                thread.join(30)


@pytest.fixture
def rig() -> Any:
    rig = Rig()
    yield rig
    rig.device.back.set()
    rig.over()


def test_a_device_that_comes_back_costs_no_rank(rig: Rig) -> None:
    rig.returns.unit_s = lambda: 1.0
    rig.breaks()
    rig.now += RETURNS_S
    rig.returns.check()
    rig.device.back.set()
    rig.returns.wait()
    rig.now += 100
    rig.returns.check()
    rig.returns.check()
    assert not rig.left


def test_a_device_that_does_not_come_back_ends_its_rank_and_is_named(rig: Rig) -> None:
    rig.returns.unit_s = lambda: 1.0
    rig.breaks()
    rig.now += RETURNS_S + 2.0 + 0.1
    rig.returns.check()
    [(rank, because)] = rig.left
    assert rank == 5
    assert "its GPU 3 (of a test) did not come back within 7 s after a break" in because


def test_what_was_enqueued_before_a_break_may_take_a_good_part_of_a_unit(rig: Rig) -> None:
    rig.returns.unit_s = lambda: 30.0
    rig.breaks()
    rig.now += 60
    rig.returns.check()
    assert not rig.left
    rig.returns.unit_s = lambda: 0.0  # nobody knows yet
    rig.returns.check()
    assert not rig.left


def test_a_device_that_fails_ends_its_rank_at_once_with_what_it_says(rig: Rig) -> None:
    rig.device.error = "CUDA error: an illegal memory access was encountered\nmore"
    rig.device.back.set()
    rig.breaks()
    rig.over()
    rig.returns.check()
    [(_, because)] = rig.left
    assert "has failed: CUDA error: an illegal memory access was encountered;" in because


def test_a_second_break_waits_for_the_device_anew(rig: Rig) -> None:
    rig.breaks()
    first = rig.returns._over
    rig.breaks()
    assert rig.returns._over is not first
    rig.device.back.set()
    rig.returns.wait()
    rig.over()
    rig.returns.check()
    assert not rig.left


def test_a_hosts_work_is_over_when_its_calls_return() -> None:
    queue = queue_of(torch.device("cpu"))
    returns = DeviceReturn(queue, lambda: 0)
    returns.break_begins()
    returns.watch_device()
    returns.wait()
    assert queue.mark()()
    assert queue.record_event().passed()
    assert not queue.is_capturing()
    assert wait_until(queue.mark(), lambda: True)


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_whose_device_does_not_come_back_is_replaced_and_the_bits_stay(
    mode: str, train: Train, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Rank 2's device hangs, and before anybody finds that out rank 1 dies. Rank 2 would do the step again, and cannot."""
    monkeypatch.setattr(device_return, "RETURNS_S", 0.2)
    monkeypatch.setattr(device_return, "_FIRST_UNITS_S", 0.2)

    def main(run: Run) -> None:
        model = ddp(run)

        def hang(step: int) -> None:
            if not os.environ.get("RACKRUN_NCCL_DOUBLE") or step != 3:
                return
            if run.rank == 2 and not run._runtime.spare:
                stream_of(run._world).hang()
                (tmp_path / "hangs").touch()
            while run.rank == 1 and not (tmp_path / "hangs").exists():  # it dies after that
                time.sleep(0.005)

        fit(run, model, adam(model), before=hang)

    monkeypatch.delenv("RACKRUN_NCCL_DOUBLE", raising=False)
    undisturbed = train(main)
    monkeypatch.setenv("RACKRUN_NCCL_DOUBLE", mode)
    ended = train(main, spares=2, kill={1: "enters a collective after Position(step=2"})
    assert not ended.differences(undisturbed), ended
    fresh = {member.rank for plan in ended.plans for member in plan.members if member.fresh}
    assert fresh >= {1, 2}, ended
    assert "rank 2 gives its place up: its double of a GPU did not come back within" in capfd.readouterr().err


# -- graphs


@pytest.mark.parametrize("mode", MODES)
def test_a_collective_in_a_graph_is_refused_before_it_is_captured(
    mode: str, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(run: Run) -> None:
        model = ddp(run)
        stream: Stream = stream_of(run._world)
        stream.captures = True
        before = run._world.page.called
        try:
            with pytest.raises(StepError, match=r"while a CUDA graph is captured.*Remedy: capture compute only"):
                dist.all_reduce(torch.ones(1))
        finally:
            stream.captures = False
        assert run._world.page.called == before
        fit(run, model, adam(model), steps=2)

    monkeypatch.setenv("RACKRUN_NCCL_DOUBLE", mode)
    ended = train(main, spares=0)
    assert ended.exit_code == 0, ended


def test_a_world_that_nobody_changes_may_capture_its_loopbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SimpleNamespace(queue=SimpleNamespace(is_capturing=lambda: True), machine=MembershipMachine())
    WorkerMembership._refuse_capture(
        cast("WorkerMembership", world), cast("Any", SimpleNamespace(size=lambda: 1)), "allreduce"
    )
    with pytest.raises(StepError):
        WorkerMembership._refuse_capture(
            cast("WorkerMembership", world), cast("Any", SimpleNamespace(size=lambda: 2)), "allreduce"
        )
