"""The model and the text of examples/train_gpt.py, trained once: writes the validation loss. Without a launcher, on one process:
what is asked is what rounding does, and ``exact`` rounds alike on any number of ranks."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import rackrun

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from train_gpt import GPT, SIZES, ByteWindows, loss_of, standard_library

EVERY = 8
"""Windows at a time in the validation."""


def train(reduction: str, seed: int, steps: int, windows: int) -> dict[str, float]:
    found: dict[str, float] = {}

    @rackrun.elastic(global_batch_size=16, micro_batch_size=2, seed=seed, reduction=reduction)  # type: ignore[arg-type]
    def main(run: rackrun.Run) -> None:
        size = SIZES["small"]
        train_text, validation_text = standard_library()
        validation = ByteWindows(validation_text, size.context)
        model = DDP(GPT(size).to(run.device))
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(ByteWindows(train_text, size.context))

        @run.step
        def train_step(step: rackrun.Step) -> float:
            for batch in data:
                step.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            return step.loss

        def evaluate() -> None:
            rows = range(0, len(validation), max(len(validation) // windows, 1))[:windows]
            with torch.no_grad():
                losses = [
                    loss_of(model, torch.stack([validation[row] for row in rows[at : at + EVERY]])).item()
                    for at in range(0, len(rows), EVERY)
                ]
            found["validation"] = sum(losses) / len(losses)

        run.at_end(evaluate)
        for number in run.steps(steps):
            found["training"] = train_step(number)

    main()
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--reduction", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--windows", type=int, default=256)
    parser.add_argument("--into", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = train(arguments.reduction, arguments.seed, arguments.steps, arguments.windows)
    arguments.into.write_text(json.dumps(result))
