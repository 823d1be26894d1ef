"""Step times with and without rackrun: blocks of steps of trainings under the launcher, and of the same training bare, in a process beside them. They
take turns, so that all see the same machine."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset

import rackrun

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
from common import Record, doubled, show_stacks_in_time
from train_gpt import GPT, Size

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, required=True)
parser.add_argument("--width", type=int, required=True)
parser.add_argument("--context", type=int, default=1024)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--block", type=int, default=10)
parser.add_argument("--blocks", type=int, default=4, help="of each kind")
parser.add_argument("--cold-blocks", type=int, default=1, help="before them, of which only the times are written down")
parser.add_argument("--snapshot-every", type=int, default=10**6)
parser.add_argument("--reduction", default="fast")
parser.add_argument("--syncs", action="store_true", help="count what waits for the device, in a block at the end")
parser.add_argument("--micro", type=int, required=True, help="of --batch, which is of all ranks")
parser.add_argument("--kind", required=True, help="its name among those that take turns; bare: without rackrun")
parser.add_argument("--turns", required=True, help="the names of all, in order, with commas between")
parser.add_argument("--turns-at", type=Path, required=True, help="a folder that all of them have")
parser.add_argument("--record", required=True)
parser.add_argument("--flags", type=Path, required=True)
ARGS = parser.parse_args()
SIZE = Size(ARGS.layers, ARGS.width, max(ARGS.width // 128, 2), ARGS.context)


class Tokens(Dataset[Tensor]):
    def __init__(self) -> None:
        draws = torch.Generator().manual_seed(11)
        self.tokens = torch.randint(0, 256, (512, ARGS.context + 1), generator=draws)

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index % 512]


PARTS = ("to the forward", "to the end of backward", "to the update", "to the end of the step", "to the next step")


class Between:
    """Marks on the device, for how long it is idle before the update and before the next forward. And where the host is
    when. A step that runs again, as the first does where the reduction is exact, counts once."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._marks: list[dict[str, Any]] = []
        """Of each step since they were last asked for."""
        self._host: list[dict[str, float]] = []

    def step_begins(self) -> None:
        self._marks.append({})
        self._host.append({"begin": time.perf_counter()})

    def forward_begins(self) -> None:
        self._note("forward")

    def backward_done(self) -> None:
        self._note("backward")

    def update_begins(self) -> None:
        self._note("update")

    def update_done(self) -> None:
        self._note("updated", host=False)

    def step_ends(self) -> None:
        self._host[-1]["end"] = time.perf_counter()

    def _note(self, what: str, *, host: bool = True) -> None:
        if not self._host:
            return  # a spare warms up
        if host:
            self._host[-1][what] = time.perf_counter()
        if self._gpu:
            self._marks[-1][what] = torch.cuda.Event(enable_timing=True)
            self._marks[-1][what].record()
        else:
            self._marks[-1][what] = time.perf_counter()

    def taken_ms(self) -> dict[str, list[float]]:
        """Of each step but the last: the device's idle times, the host's `PARTS`, and the whole step by the host. The
        device must be idle."""
        marks, host, self._marks, self._host = self._marks, self._host, [], []
        told: dict[str, list[float]] = {"before update": [], "before forward": [], "step": [], **{p: [] for p in PARTS}}
        for (mark, after), (at, following) in zip(itertools.pairwise(marks), itertools.pairwise(host), strict=True):
            told["before update"].append(self._ms(mark["backward"], mark["update"]))
            told["before forward"].append(self._ms(mark["updated"], after["forward"]))
            told["step"].append(1e3 * (following["begin"] - at["begin"]))
            times = [*(at[one] for one in ("begin", "forward", "backward", "update", "end")), following["begin"]]
            for part, (begin, end) in zip(PARTS, itertools.pairwise(times), strict=True):
                told[part].append(1e3 * (end - begin))
        return told

    def _ms(self, one: Any, other: Any) -> float:
        return float(one.elapsed_time(other)) if self._gpu else 1e3 * float(other - one)


def idle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def loss_of(model: nn.Module, tokens: Tensor, device: torch.device) -> Tensor:
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        logits = model(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class Turns:
    """Files: block *n* of the first kind, of the second, and so on; then the next one of the first."""

    def __init__(self) -> None:
        kinds: list[str] = ARGS.turns.split(",")
        at = kinds.index(ARGS.kind)
        self._before, self._is_first, self._last = kinds[at - 1], at == 0, kinds[-1]
        self._number = 0

    def take(self) -> None:
        """Returns when the kind before this one has done its block."""
        number = self._number if self._is_first else self._number + 1
        if number:
            self._wait_for(self._before, number)

    def over(self, *, tells: bool) -> None:
        self._number += 1
        if tells:
            self._file(ARGS.kind, self._number).touch()

    def wait_for_all(self) -> None:
        """Nobody else has a block to do any more."""
        self._wait_for(self._last, self._number)

    def _wait_for(self, kind: str, number: int) -> None:
        while not self._file(kind, number).exists():
            time.sleep(0.001)

    def _file(self, kind: str, number: int) -> Path:
        path: Path = ARGS.turns_at / f"{kind}-{number}"
        return path


class Blocks:
    """Times of one kind, written down block by block."""

    def __init__(self, device: torch.device, between: Between, *, tells: bool = True) -> None:
        self._device, self._between, self._tells = device, between, tells
        self._record, self._times = Record(ARGS.record), []  # type: ignore[var-annotated]
        self._turns = Turns()
        self._number, self._began = 0, 0.0

    def begin(self) -> None:
        self._turns.take()
        idle(self._device)
        self._began, self._times = time.perf_counter(), []

    def step(self, call: Any) -> None:
        entered = time.perf_counter()
        self._between.step_begins()
        call()
        self._between.step_ends()
        self._times.append(time.perf_counter() - entered)

    def end(self) -> None:
        idle(self._device)
        took_s = (time.perf_counter() - self._began) / ARGS.block
        memory = torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0
        told = {"slowest_s": max(self._times), "allocated": memory, "taken_ms": self._between.taken_ms()}
        if self._tells:
            warm = self._number >= ARGS.cold_blocks
            self._record.write("block", kind=ARGS.kind, warm=warm, step_s=took_s, **told)
        self._number += 1
        self._turns.over(tells=self._tells)

    def alone(self) -> None:
        """What follows disturbs nobody."""
        self._turns.wait_for_all()

    def finish(self, **told: Any) -> None:
        if self._tells:
            self._record.write("end", kind=ARGS.kind, **told)


def model_on(device: torch.device) -> nn.Module:
    with device:  # a billion numbers are drawn there, not here
        return GPT(SIZE)


def bare() -> None:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    tokens, between = Tokens(), Between(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(3)
    model = DDP(model_on(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    optimizer.register_step_pre_hook(lambda *_: between.update_begins())
    optimizer.register_step_post_hook(lambda *_: between.update_done())
    blocks = Blocks(device, between)

    def train_step(number: int) -> None:
        batch = torch.stack([tokens[number * ARGS.batch + row] for row in range(ARGS.batch)]).to(device)
        between.forward_begins()
        loss_of(model, batch, device).backward()
        between.backward_done()
        optimizer.step()
        optimizer.zero_grad()

    for block in range(ARGS.cold_blocks + ARGS.blocks):
        blocks.begin()
        for number in range(ARGS.block):
            blocks.step(lambda number=number, block=block: train_step(block * ARGS.block + number))
        blocks.end()


@rackrun.elastic(
    global_batch_size=ARGS.batch,
    micro_batch_size=ARGS.micro,
    seed=3,
    snapshot_every=ARGS.snapshot_every,
    reduction=ARGS.reduction,
)
def elastic(run: rackrun.Run) -> None:
    device, between = run.device, Between(run.device)
    model = DDP(model_on(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    run.track(model=model, optimizer=optimizer)
    data = run.loader(Tokens())
    optimizer.register_step_pre_hook(lambda *_: between.update_begins())
    optimizer.register_step_post_hook(lambda *_: between.update_done())
    blocks = Blocks(device, between, tells=run.rank == 0)

    @run.step
    def train_step(step: rackrun.Step) -> None:
        for batch in data:
            between.forward_begins()
            step.backward(loss_of(model, batch, device))
        between.backward_done()
        optimizer.step()
        optimizer.zero_grad()

    timed = ARGS.block * (ARGS.cold_blocks + ARGS.blocks)
    seen: list[warnings.WarningMessage] = []
    for step in run.steps(timed + ARGS.block * ARGS.syncs):
        at = int(step)
        if at < timed:
            if at % ARGS.block == 0:
                blocks.begin()
            blocks.step(lambda step=step: train_step(step))
            if at % ARGS.block == ARGS.block - 1:
                blocks.end()
        else:
            if at == timed:
                blocks.alone()
            between.step_begins()
            seen += waits_of(lambda step=step: train_step(step), device)
    ours = [one for one in seen if "rackrun/" in one.filename]
    places = sorted({f"{Path(one.filename).name}:{one.lineno}" for one in ours})
    blocks.finish(syncs=len(ours) / ARGS.block if ARGS.syncs else None, places=places)


def waits_of(call: Any, device: torch.device) -> list[warnings.WarningMessage]:
    """What has waited for the device in ``call``, as torch sees it."""
    if device.type != "cuda":
        call()
        return []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [one for one in caught if "synchroniz" in str(one.message)]


if __name__ == "__main__":
    show_stacks_in_time()
    if ARGS.kind == "bare":
        bare()
    else:
        with doubled():
            elastic()
