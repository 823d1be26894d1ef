"""The double of NCCL's contract does what NCCL does, and jobs whose collectives are only enqueued end with the bits of others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Ended
from nccl_double import MODES, Double, InStream, Stream
from scripts import adam, ddp, fit, net
from torch.distributed.fsdp import fully_shard

from rackrun.worker.run import Run

Train = Callable[..., Ended]


def of_two(mode: str, body: Callable[[Double, Stream, int], Any]) -> list[Any]:
    """``body`` on two ranks, each with a stream of its own."""
    store, found = dist.HashStore(), [None, None]

    def rank(index: int) -> None:
        inner = dist.ProcessGroupGloo(dist.PrefixStore(mode, store), index, 2)
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
    double = Double(dist.ProcessGroupGloo(store, 0, 1), stream, "late")
    double.abort()
    tensor = torch.ones(3)
    work = double.call("allreduce", [tensor], summed(asynchronous=True))
    assert work is not None
    assert work.wait()
    with InStream(stream):
        assert (tensor + 0).isnan().all()
    double.close()


def test_there_is_no_receive_from_any_source() -> None:
    double = Double(dist.ProcessGroupGloo(dist.HashStore(), 0, 1), Stream(), "late")
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
