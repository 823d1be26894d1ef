"""Small checkpoints with the names of an elastic job: a model under DDP and its optimizer, in uneven shards of three ranks."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import nn

from rackrun.checkpoint.base.digest import chunk_crcs
from rackrun.checkpoint.durable.durable_manifest import shard_name
from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.checkpoint.image.boxes import Box
from rackrun.checkpoint.image.image_layout import ImageLayout, TensorEntry
from rackrun.checkpoint.image.safetensors_image import plan_image, write_image

WORLD = 3
CHUNK = 512
JOB = "run"

State = dict[str, torch.Tensor]


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    norm = nn.BatchNorm1d(70)
    made = nn.Sequential(nn.Linear(5, 70), norm, nn.Linear(70, 4, dtype=torch.bfloat16))
    assert norm.running_mean is not None
    assert norm.num_batches_tracked is not None
    norm.running_mean.normal_()
    norm.num_batches_tracked += seed
    return made


def state(seed: int, name: str = "model") -> State:
    """What the job tracks after step ``seed``."""
    trained = model(seed)
    held = {f"{name}/param/module.{path}": tensor.detach() for path, tensor in trained.named_parameters()}
    held |= {f"{name}/buffer/module.{path}": tensor for path, tensor in trained.named_buffers()}
    for index, parameter in enumerate(trained.parameters()):
        held[f"optimizer/state/0/{index}/exp_avg"] = torch.randn(parameter.shape)
        held[f"optimizer/state/0/{index}/step"] = torch.tensor(float(seed))
    return held


def box_of(tensor: torch.Tensor, rank: int) -> Box:
    """Rows, as torch.chunk splits: 70 in 24, 24 and 22, 4 in 2, 2 and none."""
    if not tensor.dim():
        return Box((), ())
    each = math.ceil(tensor.shape[0] / WORLD)
    start, stop = (min(at * each, tensor.shape[0]) for at in (rank, rank + 1))
    return Box((start, *[0] * (tensor.dim() - 1)), (stop - start, *tensor.shape[1:]))


def image(held: State, rank: int) -> tuple[ImageLayout, memoryview]:
    entries, parts = [], {}
    for name, tensor in held.items():
        box = Box.whole(tensor.shape) if "/buffer/" in name else box_of(tensor, rank)
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(TensorEntry(name, dtype, tuple(tensor.shape), box))
        parts[name] = tensor[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
    layout = plan_image(entries, plain=4)
    payload = memoryview(bytearray(layout.total_bytes))
    write_image(layout, parts, b"abcd", payload)
    return layout, payload


def save(
    root: Path, step: int, *, fencing_token: int = 1, job: str = JOB, held: State | None = None, ranks: int = WORLD
) -> DurableStore:
    """Checkpoint ``step``; with fewer ``ranks`` than the world it stays unfinished."""
    store = DurableStore(root, job)
    writer = store.writer(step, step, fencing_token, WORLD)
    for rank in range(ranks):
        layout, payload = image(held if held is not None else state(step), rank)
        crcs = chunk_crcs(payload, CHUNK)
        assert writer.write_shard(rank, payload, layout.layout_hash, crcs, chunk_bytes=CHUNK)
    assert writer.finish() == (ranks == WORLD)
    return store


def shard_path(store: DurableStore, number: int, rank: int) -> Path:
    return store.path(number) / shard_name(rank, WORLD)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
