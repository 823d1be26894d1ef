"""What a digest of a rank's parameters and optimizer state costs (``--check-replicas``), beside what else passes over them.

    python benchmarks/replicas.py              25 million parameters with AdamW: 300 MB
    python benchmarks/replicas.py --device cuda

One process, one thread. In every round each case runs once, in an order that changes; the median of all rounds is reported, and the
median of the ratios within a round. **Optimizer step**: AdamW, on the same state. **memcpy**: a copy of as many bytes, about what a
snapshot takes.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
from jobs import machine, save
from torch import nn

from rackrun.worker.state.tracked_state import TrackedState

ROUNDS = 25


def measure(device: torch.device, layers: int, width: int) -> dict[str, object]:
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    state = TrackedState()
    state.track("model", model)
    state.track("optimizer", optimizer)
    size = sum(tensor.nbytes for path, tensor in state.tensors().items() if state.is_settled(path))
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    cases: dict[str, Callable[[], object]] = {
        "digest": state.settled,
        "optimizer step": optimizer.step,
        "memcpy": lambda: target.copy_(source),
    }
    rounds: list[dict[str, float]] = []
    for number in range(ROUNDS + 3):
        order = random.Random(number).sample(sorted(cases), len(cases))
        rounds.append({name: timed(cases[name], device) for name in order})
    rounds = rounds[3:]
    return {
        "bytes": size,
        "tensors": len(state.tensors()),
        "seconds": {name: statistics.median(one[name] for one in rounds) for name in cases},
        "digest over": {
            name: statistics.median(one["digest"] / one[name] for one in rounds) for name in cases if name != "digest"
        },
    }


def timed(act: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    act()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1020)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(torch.device(args.device), args.layers, args.width)
    print(found)
    save("replicas", {"machine": machine(), **found})


if __name__ == "__main__":
    main()
