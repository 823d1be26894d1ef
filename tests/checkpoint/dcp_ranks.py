"""What the ranks of `test_dcp.py` run under torchrun: ``dcp_ranks.py save|load FOLDER``.

``save``: FSDP2 trains, saves, trains, saves asynchronously while the parameters are overwritten, and is killed in its third
save. ``load``: another world takes both into a model of its own, and compares with a full gather of what was saved.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rackrun.checkpoint.dcp.dcp_storage import RackrunStorageReader, RackrunStorageWriter
from rackrun.protocol import crash_points

CRASHED_AT = "durable.data_named"


def trainer(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """14 and 5 rows: neither 2 nor 3 ranks hold equal parts of both."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 14), nn.LayerNorm(14), nn.Linear(14, 5))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(100 * step + dist.get_rank())
        model(torch.randn(4, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer, **more}


def whole(value: Any) -> Any:
    """With every DTensor gathered."""
    if isinstance(value, DTensor):
        return value.full_tensor().clone()
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return [whole(item) for item in value] if isinstance(value, list) else value


def differences(a: Any, b: Any, at: str = "") -> list[str]:
    """Where two nested states are not equal to the bit."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [found for key in a for found in differences(a[key], b[key], f"{at}/{key}")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [
            found for key, (x, y) in enumerate(zip(a, b, strict=True)) for found in differences(x, y, f"{at}/{key}")
        ]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
    else:
        same = type(a) is type(b) and bool(a == b)
    return [] if same else [at]


def save(folder: Path) -> None:
    model, optimizer = trainer(seed=1)
    directory = folder / "run"
    train(model, optimizer, 2)
    state = state_of(model, optimizer, step=2, note="after two")
    dcp.save(state, checkpoint_id=directory, storage_writer=RackrunStorageWriter())
    keep(whole(state), folder / "0.pt")

    train(model, optimizer, 1)
    state = state_of(model, optimizer, step=3, note="after three")
    keep(whole(state), folder / "1.pt")
    saved: Any = dcp.async_save(state, checkpoint_id=directory, storage_writer=RackrunStorageWriter())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    saved.result()

    if dist.get_rank() == 1:
        crash_points.enable(lambda name: die(folder) if name == CRASHED_AT else None)
    dcp.save(state_of(model, optimizer, step=4, note="never"), storage_writer=RackrunStorageWriter(directory))


def die(folder: Path) -> None:
    (folder / "died").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def keep(state: dict[str, Any], path: Path) -> None:
    if dist.get_rank() == 0:
        torch.save(state, path)


def load(folder: Path) -> None:
    for number, name in (("run/gen-000000000000", "0.pt"), ("run", "1.pt")):
        model, optimizer = trainer(seed=7)
        state = state_of(model, optimizer, step=-1, note="")
        dcp.load(state, checkpoint_id=folder / number, storage_reader=RackrunStorageReader())
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        found = whole(state_of(model, optimizer, step=state["step"], note=state["note"]))
        different = differences(found, torch.load(folder / name, weights_only=True))
        assert not different, f"{number}: {different}"
    (folder / f"loaded-{dist.get_rank()}").touch()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    {"save": save, "load": load}[sys.argv[1]](Path(sys.argv[2]))
    dist.destroy_process_group()
