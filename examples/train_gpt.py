"""A small byte-level GPT, trained on text that every machine has: the sources of Python's own standard library.

    rackrun --standalone --nproc-per-node 5 --spares 1 examples/train_gpt.py     # 4 ranks and 1 warm spare
    python examples/train_gpt.py                                                 # the same on one process

Kill a rank (``kill -9``) whenever you like: the losses, and the weights at the end, are the ones of a run without faults.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset

import rackrun

BYTES = 256  # the vocabulary


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    context: int


SIZES = {
    "small": Size(layers=4, width=128, heads=4, context=128),
    "25m": Size(layers=8, width=512, heads=8, context=256),
}


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each with a residual."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_attention = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.norm_mlp = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:  # [batch, time, width]
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        added: Tensor = self.down(F.gelu(self.up(self.norm_mlp(x))))
        return x + added


class GPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(BYTES, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, BYTES, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:  # residual branches smaller, as in GPT-2
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * size.layers) ** 0.5 if residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, time] -> [batch, time, BYTES]
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class ByteWindows(Dataset[Tensor]):
    """Windows of ``context + 1`` bytes, side by side: the last byte of each is only predicted."""

    def __init__(self, text: bytes, context: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.context
        return self.text[start : start + self.context + 1].long()


def standard_library(bytes_max: int = 4_000_000) -> tuple[bytes, bytes]:
    """(training text, validation text): every tenth file is for validation. The same on all ranks of one machine."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "pydoc_data"}
    files = sorted(path for path in root.rglob("*.py") if not left_out & set(path.relative_to(root).parts))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for number, path in enumerate(files):
        parts[number % 10 == 9].append(path.read_bytes())
    return b"".join(parts[0])[:bytes_max], b"".join(parts[1])[: bytes_max // 10]


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross-entropy of the next byte, in nats."""
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def weights_sha256(model: nn.Module) -> str:
    """Of this rank's parameters (its shards, under FSDP2), bit for bit."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        digest.update(name.encode() + local.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--size", choices=SIZES, default="small", help="25m: about 25 million parameters")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--eval-every", type=int, default=20)
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 (fully_shard) instead of DDP")
    parser.add_argument("--save", type=Path, help="write the hash of every rank's final weights to this JSON file")
    return parser.parse_args()


@rackrun.elastic(global_batch_size=16, micro_batch_size=2, seed=1234)
def main(run: rackrun.Run) -> None:
    args = arguments()
    size = SIZES[args.size]
    train_text, validation_text = standard_library()
    validation = ByteWindows(validation_text, size.context)

    gpt = GPT(size).to(run.device)
    if args.fsdp:
        for block in gpt.blocks:
            fully_shard(block)
        fully_shard(gpt)
    model: nn.Module = gpt if args.fsdp else DDP(gpt)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(ByteWindows(train_text, size.context))

    @run.step
    def train_step(step: rackrun.Step) -> float:
        for windows in data:
            step.backward(loss_of(model, windows))
        optimizer.step()
        optimizer.zero_grad()
        return step.loss

    def evaluate() -> None:
        rows = range(run.rank, min(64, len(validation)) // run.world_size * run.world_size, run.world_size)
        windows = torch.stack([validation[row] for row in rows]).to(run.device)
        with torch.no_grad():
            loss = loss_of(model, windows)
        dist.all_reduce(loss)
        loss /= run.world_size
        run.log(val_loss=round(loss.item(), 4))

    def save() -> None:
        hashes: list[str | None] = [None] * run.world_size
        dist.all_gather_object(hashes, weights_sha256(model))
        if run.is_main:
            print(f"final weights sha256 {hashes[0]}", flush=True)
            if args.save:
                args.save.write_text(json.dumps({"weights_sha256": hashes}, indent=1) + "\n")

    run.every(args.eval_every, evaluate)
    run.at_end(save)

    for step in run.steps(args.steps):
        run.log(loss=train_step(step))


if __name__ == "__main__":
    main()
