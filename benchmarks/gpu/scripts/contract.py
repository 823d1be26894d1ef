"""What ``torch.distributed`` promises, case by case, on the elastic group of a whole job: each rank writes what it has seen."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import Record, doubled, show_stacks_in_time

parser = argparse.ArgumentParser()
parser.add_argument("--cases", required=True)
parser.add_argument("--size", type=int, default=2**20)
parser.add_argument("--record", required=True)
parser.add_argument("--flags", type=Path, required=True)
ARGS = parser.parse_args()
_STEPS = 5
"""By then a step is as all later ones are."""
Case = Callable[[rackrun.Run], dict[str, Any] | None]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def expect(what: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        raise AssertionError(f"{what}: {found!r} instead of {wanted!r}")


def everybody(run: rackrun.Run, *, value: float = 1.0, device: torch.device | None = None) -> None:
    """The generation is whole: a sum over all has the right value."""
    tensor = torch.full((4,), value * (run.rank + 1), device=device or run.device)
    dist.all_reduce(tensor)
    expect("a sum over all ranks", tensor.tolist(), [value * sum(range(1, run.world_size + 1))] * 4)


# -- what collectives return
@case
def synchronous(run: rackrun.Run) -> None:
    """torch makes something of what the group returns: it must be a Work, or nothing may be made of it."""
    group = dist.group.WORLD
    tensor = torch.ones(4, device=run.device)
    expect("what dist.all_reduce returns", dist.all_reduce(tensor), None)
    expect("a sum", tensor.tolist(), [float(run.world_size)] * 4)
    options = dist.AllreduceOptions()
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    again = torch.ones(4, device=run.device)
    work = group.allreduce([again], options)  # type: ignore[union-attr]
    expect("a synchronous call gives a Work", isinstance(work, dist.Work), True)
    work.wait()
    expect("a sum", again.tolist(), [float(run.world_size)] * 4)


@case
def asynchronous(run: rackrun.Run) -> None:
    tensor = torch.ones(4, device=run.device)
    work = dist.all_reduce(tensor, async_op=True)
    expect("an asynchronous call gives a Work", isinstance(work, dist.Work), True)
    work.wait()
    expect("a sum", tensor.tolist(), [float(run.world_size)] * 4)
    later = torch.ones(4, device=run.device)
    held = dist.all_reduce(later, async_op=True)
    held.get_future().then(lambda future: future.value()).wait()
    expect("the sum of a future", later.tolist(), [float(run.world_size)] * 4)


COSTS: dict[str, Any] = {}


@case
def enqueue_cost(run: rackrun.Run) -> dict[str, Any]:  # noqa: ARG001 - it was measured in a step
    """Microseconds of the host for a call of the elastic group, and of the communicator below it."""
    return COSTS


def measure_calls(run: rackrun.Run) -> None:
    """In a step: there a wait is the stream's, for both."""
    group: Any = dist.group.WORLD
    inner = getattr(getattr(group, "communicator", None), "inner", None)
    tensor = torch.ones(16, device=run.device)
    options = dist.AllreduceOptions()
    if hasattr(options, "asyncOp"):
        options.asyncOp = True

    def cost(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(60):
            began = time.perf_counter()
            work = call()
            times.append(time.perf_counter() - began)
            if work is not None:
                work.wait()
        return 1e6 * statistics.median(times)

    COSTS["elastic_us"] = cost(lambda: group.allreduce([tensor], options))
    reduce = getattr(inner, "allreduce", None)
    COSTS["bare_us"] = cost(lambda: reduce([tensor], options)) if reduce else None


# -- the host's side of a world of GPUs
@case
def objects(run: rackrun.Run) -> None:
    found: list[Any] = [None] * run.world_size
    dist.all_gather_object(found, {"rank": run.rank})
    expect("gathered objects", found, [{"rank": rank} for rank in range(run.world_size)])
    told: list[Any] = ["from 0" if run.rank == 0 else None]
    dist.broadcast_object_list(told, src=0)
    expect("a broadcast object", told, ["from 0"])


@case
def barrier(run: rackrun.Run) -> None:
    dist.barrier()
    everybody(run)


@case
def host_tensor(run: rackrun.Run) -> None:
    everybody(run, device=torch.device("cpu"))


@case
def checkpoint(run: rackrun.Run) -> None:
    """torch.distributed.checkpoint, whose plan travels as objects."""
    import torch.distributed.checkpoint as dcp

    folder = ARGS.flags / "dcp"
    state = {"weight": torch.arange(8.0, device=run.device)}
    dcp.save(state, checkpoint_id=str(folder))
    back = {"weight": torch.zeros(8, device=run.device)}
    dcp.load(back, checkpoint_id=str(folder))
    expect("what was loaded", back["weight"].tolist(), state["weight"].tolist())


# -- misuse: the caller's error, and nobody is lost for it
@case
def any_source(run: rackrun.Run) -> dict[str, Any]:
    before, tensor = run.generation, torch.zeros(1, device=run.device)
    says = "received"
    if run.rank == 0:
        try:
            dist.recv(tensor)
        except (NotImplementedError, RuntimeError, ValueError) as error:
            says = type(error).__name__
        expect("a receive from any source raises", says == "received", False)
    everybody(run)
    expect("the generation", run.generation, before)
    return {"note": says} if run.rank == 0 else {}


@case
def wrong_dtype(run: rackrun.Run) -> dict[str, Any]:
    before, says = run.generation, "nothing"
    try:
        dist.all_gather_into_tensor(
            torch.zeros(4 * run.world_size, device=run.device), torch.zeros(4, dtype=torch.int64, device=run.device)
        )
    except (RuntimeError, ValueError, TypeError) as error:
        says = type(error).__name__
    expect("a wrong dtype raises", says == "nothing", False)
    everybody(run)
    expect("the generation", run.generation, before)
    return {"note": says}


@case
def out_of_memory(run: rackrun.Run) -> dict[str, Any]:
    before, says = run.generation, "nothing"
    if run.device.type == "cuda":
        try:
            big = torch.ones(1, device=run.device).expand(2**44)  # a collective of it would need 64 TiB
            dist.all_gather_into_tensor(torch.empty(2**44 * run.world_size, device=run.device), big)
        except (torch.OutOfMemoryError, RuntimeError, ValueError) as error:
            says = type(error).__name__
        expect("64 TiB raise", says == "nothing", False)
    everybody(run)
    expect("the generation", run.generation, before)
    return {"note": says}


@case
def captured(run: rackrun.Run) -> dict[str, Any]:
    """A captured collective would replay into a communicator that is gone: it must be refused."""
    graph, tensor, says = torch.cuda.CUDAGraph(), torch.ones(4, device=run.device), "nothing"
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph):
            dist.all_reduce(tensor)
    except Exception as error:  # noqa: BLE001 - which one is what is asked
        says = f"{type(error).__module__}.{type(error).__name__}"
    torch.cuda.synchronize()
    everybody(run)
    expect("the capture of a collective is refused by a typed error of rackrun", says.startswith("rackrun."), True)
    return {"note": says}


# -- point to point
def _pattern(rank: int, device: torch.device) -> Tensor:
    return torch.full((ARGS.size // 4,), float(rank + 1), device=device)


@case
def ring(run: rackrun.Run) -> None:
    size, rank = run.world_size, run.rank
    mine, got = _pattern(rank, run.device), torch.zeros(ARGS.size // 4, device=run.device)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine, (rank + 1) % size), dist.P2POp(dist.irecv, got, (rank - 1) % size)]
    )
    for work in works:
        work.wait()
    expect("what came round the ring", got.unique().tolist(), [float((rank - 1) % size + 1)])


@case
def both_send_first(run: rackrun.Run) -> None:
    if run.rank < 2:
        peer = 1 - run.rank
        mine, got = _pattern(run.rank, run.device), torch.zeros(ARGS.size // 4, device=run.device)
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, got, peer)])
        for work in works:
            work.wait()
        expect("what the peer has sent", got.unique().tolist(), [float(peer + 1)])
    everybody(run)


@rackrun.elastic(global_batch_size=6, micro_batch_size=1, seed=3)
def main(run: rackrun.Run) -> None:
    record = Record(ARGS.record)
    model = DDP(nn.Linear(4, 4).to(run.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(TensorDataset(torch.randn(64, 4)))

    @run.step
    def train_step(step: rackrun.Step) -> None:
        for (x,) in data:
            step.backward(model(x).square().mean())
        if "enqueue_cost" in ARGS.cases and int(step) == _STEPS - 1:
            measure_calls(run)
        optimizer.step()
        optimizer.zero_grad()

    def all_cases() -> None:
        for name in ARGS.cases.split(","):
            began, told, says = time.monotonic(), {}, "ok"
            try:
                told = CASES[name](run) or {}
                if run.device.type == "cuda":
                    torch.cuda.synchronize()
            except Exception as error:  # noqa: BLE001 - told to the check; the next case is tried
                traceback.print_exc()
                says = f"{type(error).__name__}: {error}"
            record.write("case", case=name, rank=run.rank, says=says, seconds=time.monotonic() - began, **told)

    run.at_end(all_cases)
    for step in run.steps(_STEPS):
        train_step(step)


if __name__ == "__main__":
    show_stacks_in_time()
    tempfile.tempdir = str(ARGS.flags)
    with doubled():
        main()
