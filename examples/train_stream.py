"""The small GPT of train_gpt.py, trained on a stream of packed tokens: documents one after another, cut into sequences.

    python examples/train_stream.py --prepare tokens/                                           # tokenise, once
    rackrun --standalone --nproc-per-node 5 --spares 1 examples/train_stream.py --tokens tokens/    # 4 ranks, 1 spare

Kill a rank (``kill -9``) whenever you like: each token is in one committed step, and the weights at the end are the ones
of a run without faults.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from train_gpt import GPT, SIZES, loss_of, weights_sha256

import rackrun

SIZE = SIZES["small"]


class PackedTokens:
    """The documents of one data shard in an order of their own in each epoch, packed into sequences of ``length`` tokens.

    ``folder`` holds ``tokens.npy`` (uint16) and ``ends.npy``, where each document ends in it. What is left of an epoch
    at its end is shorter than a sequence, and is left out.
    """

    def __init__(self, folder: Path, shard: int, shards: int, length: int) -> None:
        self._tokens = np.load(folder / "tokens.npy", mmap_mode="r")
        ends = np.load(folder / "ends.npy")
        starts = np.concatenate(([0], ends[:-1]))
        self._documents = list(zip(starts[shard::shards].tolist(), ends[shard::shards].tolist(), strict=True))
        self._shard, self._length = shard, length
        self._epoch = self._document = self._offset = 0
        """The next token: its document, by its place in the epoch's order, and its place in the document."""

    def set_epoch(self, epoch: int) -> None:
        """Begin at the start of an epoch."""
        self._epoch, self._document, self._offset = epoch, 0, 0

    def state_dict(self) -> dict[str, int]:
        return {"document": self._document, "offset": self._offset}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._document, self._offset = state["document"], state["offset"]

    def __iter__(self) -> Iterator[Tensor]:
        order = np.random.default_rng((self._shard, self._epoch)).permutation(len(self._documents))
        while True:
            parts: list[np.ndarray[Any, Any]] = []
            missing = self._length
            while missing and self._document < len(order):
                start, end = self._documents[order[self._document]]
                part = self._tokens[start + self._offset : min(end, start + self._offset + missing)]
                parts.append(part)
                missing -= len(part)
                self._offset += len(part)
                if start + self._offset == end:
                    self._document, self._offset = self._document + 1, 0
            if missing:
                return
            yield torch.from_numpy(np.concatenate(parts).astype(np.int64))


def prepare(folder: Path, bytes_max: int = 4_000_000) -> None:
    """Write the sources of Python's standard library as tokens: one document for each file, one token for each byte."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in sorted(root.rglob("*.py")) if "site-packages" not in path.parts]
    documents, size = [], 0
    for path in files:
        if size < bytes_max and (text := path.read_bytes()):
            documents.append(np.frombuffer(text, np.uint8).astype(np.uint16))
            size += len(text)
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "tokens.npy", np.concatenate(documents))
    np.save(folder / "ends.npy", np.cumsum([len(document) for document in documents]))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--prepare", type=Path, metavar="FOLDER", help="write the tokens there, and train nothing")
    which.add_argument("--tokens", type=Path, metavar="FOLDER", help="train on the tokens there")
    parser.add_argument("--steps", type=int, default=60)
    return parser.parse_args()


@rackrun.elastic(global_batch_size=16, micro_batch_size=2, seed=1234)
def main(run: rackrun.Run) -> None:
    args = arguments()
    model: nn.Module = DDP(GPT(SIZE).to(run.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    run.track(model=model, optimizer=optimizer)
    data = run.stream(lambda shard, shards: PackedTokens(args.tokens, shard, shards, SIZE.context + 1))

    @run.step
    def train_step(step: rackrun.Step) -> float:
        for windows in data:
            step.backward(loss_of(model, windows))
        optimizer.step()
        optimizer.zero_grad()
        return step.loss

    def show() -> None:
        if run.is_main:
            print(f"final weights sha256 {weights_sha256(model)}", flush=True)

    run.at_end(show)
    for step in run.steps(args.steps):
        run.log(loss=train_step(step))


if __name__ == "__main__":
    if folder := arguments().prepare:
        prepare(folder)
    else:
        main()
