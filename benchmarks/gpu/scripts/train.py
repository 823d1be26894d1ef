"""A training that strikes itself and writes down all that it computes: losses, sample ids, weights, by nothing of rackrun's own.

WRAP is ``ddp``, ``fsdp``, ``tp`` (pairs of ranks share each layer, and FSDP2 over the pairs) or ``plain`` (DDP, and the script calls ``backward()``
itself, with a sub-group's collective in the step).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset

import rackrun

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import Record, Strikes, digest_of, doubled, numbers, show_stacks_in_time, sleep_on_device

SAMPLES = 4096


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wrap", choices=("ddp", "fsdp", "tp", "plain"), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--record", required=True)
    parser.add_argument("--strikes", default="[]")
    parser.add_argument("--flags", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--micro", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--sleep-ms", type=float, default=0.0, help="of the GPU, before each backward")
    parser.add_argument(
        "--fill", type=float, default=0.0, help="so much of the GPU's memory for each process, spares too"
    )
    parser.add_argument("--reduction", default="exact")
    parser.add_argument("--slow-rank", type=int, default=-1, help="only this rank's device sleeps")
    parser.add_argument("--amp", action="store_true", help="autocast, and a gradient scaler")
    parser.add_argument("--fp8", action="store_true", help="layers that multiply in 8 bits")
    parser.add_argument("--cold", action="store_true", help="spares do not warm NCCL up")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--phases", type=int, default=0, help="a phase after so many steps")
    return parser.parse_args()


ARGS = arguments()
FP8, FP8_MOST = torch.float8_e4m3fn, 448.0


class Points(Dataset[tuple[Tensor, Tensor, int]]):
    def __init__(self) -> None:
        self.x = torch.randn(SAMPLES, ARGS.width, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.x[index], self.x[index].sin(), index


class InEightBits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, largest: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        of_x, of_weight = largest / FP8_MOST, weight.abs().amax() / FP8_MOST
        x8, weight8 = (
            (one / scale).clamp(-FP8_MOST, FP8_MOST).to(FP8) for one, scale in ((x, of_x), (weight, of_weight))
        )
        out = torch._scaled_mm(x8, weight8.t(), scale_a=of_x, scale_b=of_weight, out_dtype=torch.bfloat16)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight, gradients[0].t() @ x, None


class EightBits(nn.Linear):
    """Scaled by how large its inputs were so far: state that takes part in what is computed next, and that a swap has to carry."""

    largest: Tensor

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.register_buffer("largest", torch.full((), 4.0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = InEightBits.apply(x, self.weight, self.largest) + self.bias  # type: ignore[no-untyped-call]
        with torch.no_grad():
            self.largest.copy_(0.9 * self.largest + 0.1 * x.abs().amax())
        return out


def model_of() -> nn.Sequential:
    parts: list[nn.Module] = []
    for _ in range(ARGS.layers):
        layer = EightBits(ARGS.width) if ARGS.fp8 else nn.Linear(ARGS.width, ARGS.width)
        parts += [layer, nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*parts, nn.Linear(ARGS.width, ARGS.width))


def _graph_breaks() -> int:
    from torch._dynamo.utils import counters

    return sum(counters["graph_break"].values())


@rackrun.elastic(
    global_batch_size=ARGS.batch,
    micro_batch_size=ARGS.micro,
    seed=3,
    snapshot_every=1,
    reduction=ARGS.reduction,
    mesh={"dp": -1, "tp": 2} if ARGS.wrap == "tp" else None,
)
def main(run: rackrun.Run) -> None:
    record, strikes = Record(ARGS.record), Strikes(ARGS.strikes, ARGS.flags)
    ballast = None
    if ARGS.fill and run.device.type == "cuda":
        share = ARGS.fill * torch.cuda.mem_get_info(run.device)[1]  # what is free changes meanwhile
        ballast = torch.empty(int(share), dtype=torch.uint8, device=run.device)
    blocks = model_of().to(run.device)
    model: nn.Module = blocks
    if ARGS.wrap == "tp":
        assert run.mesh is not None
        layers = [name for name, part in blocks.named_children() if isinstance(part, nn.Linear)]
        plan: dict[str, ParallelStyle] = {
            name: ColwiseParallel() if at % 2 == 0 else RowwiseParallel() for at, name in enumerate(layers)
        }
        parallelize_module(blocks, run.mesh["tp"], plan)
        fully_shard(blocks, mesh=run.mesh["dp"])
    elif ARGS.wrap == "fsdp":
        for part in blocks:
            if isinstance(part, nn.Linear):
                fully_shard(part)
        fully_shard(blocks)
    else:
        model = DDP(blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    kind, half = run.device.type, torch.float16 if run.device.type == "cuda" else torch.bfloat16
    scaler = torch.amp.GradScaler(kind, enabled=ARGS.amp, init_scale=1024.0)
    if ARGS.amp:
        run.track(scaler=scaler)
    forward = torch.compile(model) if ARGS.compile else model
    data = run.loader(Points())
    pair = dist.new_group(list(range(min(2, run.world_size)))) if ARGS.wrap == "plain" else None
    phases = 0
    if strikes.has("give"):
        from benchmarks.gpu import seams

        seams.when_giving(lambda: strikes.at("give", run.rank, ARGS.steps, record))

    def phase() -> None:
        nonlocal phases
        phases += 1
        total = next(model.parameters()).detach().sum().reshape(1).clone()
        strikes.at("phase", run.rank, phases, record)
        dist.all_reduce(total)
        value = float(total.item())  # what a script may act on: it must be everybody's, or not come here
        record.write("phase", rank=run.rank, value=value.hex())

    if ARGS.phases:
        run.every(ARGS.phases, phase)

    @run.step
    def train_step(step: rackrun.Step) -> tuple[float, list[int]]:
        at = int(step)
        record.write("begin", rank=run.rank, step=at, attempt=step.attempt)
        strikes.at("begin", run.rank, at, record)
        ids: list[int] = []
        for x, y, index in data:
            with torch.autocast(kind, half, enabled=ARGS.amp):
                loss = nn.functional.mse_loss(forward(x).float(), y)
            strikes.at("forward", run.rank, at, record)
            if ARGS.sleep_ms and kind == "cuda" and ARGS.slow_rank in (-1, run.rank):
                sleep_on_device(ARGS.sleep_ms / 1e3)
            if pair is not None:
                if run.rank < 2:
                    extra = torch.ones(1, device=run.device)
                    dist.all_reduce(extra, group=pair)
                    loss = loss * (extra[0] / min(2, run.world_size))
                step.scale(loss).backward()
            elif ARGS.amp:
                scaler.scale(step.scale(loss)).backward()
            else:
                step.backward(loss)
            strikes.at("backward", run.rank, at, record)
            ids += numbers(index)
        if ARGS.amp:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        strikes.at("update", run.rank, at, record)
        optimizer.zero_grad()
        return step.loss, ids

    for step in run.steps(ARGS.steps):
        loss, ids = train_step(step)
        ids = ids if ARGS.wrap != "tp" or run.rank % 2 == 0 else []  # a pair has the same samples
        record.write("done", rank=run.rank, step=int(step), loss=float(loss).hex(), ids=ids)
        strikes.wait_for_spares()
        strikes.at("done", run.rank, int(step), record)
    memory = torch.cuda.memory_reserved(run.device) if run.device.type == "cuda" else 0
    moments = [
        optimizer.state[parameter][key] for parameter in blocks.parameters() for key in ("exp_avg", "exp_avg_sq")
    ]
    record.write(
        "end",
        rank=run.rank,
        generation=int(run.generation),
        weights=digest_of(blocks.parameters()),
        moments=digest_of(moments),
        reserved=memory,
        scale=scaler.get_scale() if ARGS.amp else 1.0,
        graph_breaks=_graph_breaks() if ARGS.compile else 0,
    )
    del ballast


if __name__ == "__main__":
    show_stacks_in_time()
    if ARGS.cold:
        from benchmarks.gpu import seams

        seams.leave_spares_cold()
    with doubled():
        main()
