"""What both workloads share: the model, the data, and the marks by which the benchmark sees them from outside."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

SEED = 1234
SAMPLES = 1_000_000


class ResidualMLP(nn.Module):
    """24 residual layers of width 1024: 25.2 M parameters in fp32, so 100 MB of gradients in every all-reduce."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x)) / len(self.layers)
        return x


class Noise(Dataset[tuple[Tensor, Tensor]]):
    """Random inputs, a function of the sample's number only; the target is the input, turned around."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(self.width, generator=torch.Generator().manual_seed(index))
        return x, x.flip(0)


def loss_of(model: nn.Module, batch: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


class Marks:
    """One line per rank and finished step, appended with a single write, so that lines of several ranks never mix."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, *, rank: int, step: int, loss: float, attempt: int = 0) -> None:
        line = {"t": time.monotonic(), "rank": rank, "step": step, "pid": os.getpid(), "loss": loss, "attempt": attempt}
        os.write(self._fd, json.dumps(line).encode() + b"\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--marks", type=Path, required=True)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--checkpoint", type=Path, help="a file; torchrun's workload only")
    parser.add_argument("--checkpoint-every", type=int, default=10)
    return parser.parse_args()
