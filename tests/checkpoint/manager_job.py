"""A training script for torchrun: argv is the folder of the test, the folder on tmpfs, ddp, fsdp or hsdp, the last step, options.

Each rank appends a line to ``rank-N.jsonl`` for every step: the step, a digest of its whole state, the restart count. With
``die`` as ``rank:step:point``, that rank sends itself SIGKILL at this crash point of the save of this step, once.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from rackrun.checkpoint import CheckpointManager, MemoryTier
from rackrun.protocol import crash_points

BATCH = 12


def digest(state: dict[str, Any]) -> str:
    """Of whole tensors, so that every world size gives the same."""
    found = hashlib.blake2b(digest_size=8)
    for name, value in state.items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        found.update(f"{name} {whole.dtype} {tuple(whole.shape)}".encode() + whole.detach().numpy().tobytes())
    return found.hexdigest()


class Average:
    """Of the weights, made by hand: of DTensors where they are sharded."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {name.removeprefix("module."): p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for value, parameter in zip(self.values.values(), model.parameters(), strict=True):
            value.mul_(0.9).add_(parameter, alpha=0.1)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in self.values.items():
            value.copy_(state[name])


def digest_of(model: nn.Module, optimizer: torch.optim.Optimizer, average: Average) -> str:
    tensors: dict[str, Any] = {name.removeprefix("module."): value for name, value in model.named_parameters()}
    tensors |= {f"average.{name}": value for name, value in average.values.items()}
    for index, state in enumerate(optimizer.state.values()):
        tensors |= {f"{index}.{key}": value for key, value in state.items()}
    return digest(tensors)


def die_at(rank: int, die: str, once: Path) -> None:
    victim, step, point = die.split(":")
    if rank != int(victim) or once.exists():
        return
    seen = 0

    def handler(name: str) -> None:
        nonlocal seen
        seen += name == point
        if seen == int(step):
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    crash_points.enable(handler)


def train(folder: Path, shm: Path, kind: str, steps: int, options: dict[str, Any]) -> None:
    """In a process group that exists."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    model: nn.Module = plain
    if kind in ("fsdp", "hsdp"):
        shape = (world,) if kind == "fsdp" else (2, world // 2)
        mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        for layer in (plain[0], plain[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    progress, average = {"step": 0}, Average(model)
    with CheckpointManager(
        folder / "checkpoints", memory=MemoryTier(shm), durable_every=options.get("durable_every")
    ) as checkpoints:
        checkpoints.prepare({"model": model, "optim": optimizer, "average": average, "progress": progress})
        report = checkpoints.restore()
        with (folder / f"rank-{rank}.jsonl").open("a") as log:

            def say(**what: Any) -> None:
                log.write(json.dumps({**what, "life": os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")}) + "\n")
                log.flush()

            if report is not None:
                tiers = sorted(set(report.tiers.values()))
                say(
                    restored=report.step,
                    tiers=tiers,
                    state=digest_of(model, optimizer, average),
                    passed=len(report.passed_over),
                )
            if "die" in options:
                die_at(rank, options["die"], folder / "died")
            while progress["step"] < steps:
                at = progress["step"]
                data = torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(at))
                optimizer.zero_grad()
                model(data[rank::world]).square().mean().backward()
                optimizer.step()
                average.update(model)
                if rank == options.get("drift"):
                    with torch.no_grad():
                        next(model.parameters())[0] += 1.0
                progress["step"] = at + 1
                checkpoints.save(at + 1 + 10 * rank * options.get("skew", 0))
                known = checkpoints.latest()
                say(step=at + 1, state=digest_of(model, optimizer, average), committed=known.step if known else 0)
            checkpoints.wait_until_finished()
            say(finished=progress["step"], latest=checkpoints.latest(), failed=checkpoints.counters.failed)
        if options.get("keep"):
            checkpoints.close(keep_memory=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), json.loads(sys.argv[5]))
    dist.destroy_process_group()
