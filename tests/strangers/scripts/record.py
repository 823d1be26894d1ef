"""What a script writes about itself: one JSON line for each step and rank, and one at its end. The campaign compares nothing else.

``record.step(rank, step, loss=...)`` after a step, ``record.end(rank, model=model, ...)`` when all is done. Values may be numbers, tensors, modules,
optimizers, and containers of these. Keyword arguments are the same on every rank; ``own=`` takes a dictionary of what is this rank's alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Record:
    """Appends to ``path``. Lines are written whole, so that all ranks may share the file."""

    def __init__(self, path: str) -> None:
        self._path = path

    def step(self, rank: int, step: int, own: dict[str, Any] | None = None, **values: Any) -> None:
        self._write("step", rank, int(step), own or {}, values)

    def end(self, rank: int, own: dict[str, Any] | None = None, **values: Any) -> None:
        self._write("end", rank, -1, own or {}, values)

    def _write(self, kind: str, rank: int, step: int, own: dict[str, Any], values: dict[str, Any]) -> None:
        line = {"kind": kind, "rank": rank, "step": step}
        line["own"] = {name: summary(value) for name, value in own.items()}
        line["shared"] = {name: summary(value) for name, value in values.items()}
        with open(self._path, "ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")


def summary(value: Any) -> list[Any]:
    """[digest of all bits, sum of magnitudes]."""
    digest, size = hashlib.sha256(), 0.0
    for name, leaf in leaves(value):
        digest.update(name.encode())
        if isinstance(leaf, Tensor):
            flat = (leaf.to_local() if isinstance(leaf, DTensor) else leaf).detach().cpu().contiguous().reshape(-1)
            digest.update(str(flat.dtype).encode() + flat.view(torch.uint8).numpy().tobytes())
            size += float(flat.double().abs().sum())
        elif isinstance(leaf, np.ndarray):
            digest.update(leaf.tobytes())
            size += float(np.abs(leaf.astype(np.float64)).sum())
        else:
            digest.update((leaf.hex() if isinstance(leaf, float) else repr(leaf)).encode())
            size += abs(float(leaf)) if isinstance(leaf, (int, float)) else 0.0
    return [digest.hexdigest()[:16], size]


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if hasattr(value, "state_dict"):
        yield from leaves(value.state_dict(), name)
    elif isinstance(value, dict):
        for key in sorted(value, key=str):  # a copy of an optimizer's state may have another order
            yield from leaves(value[key], f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from leaves(item, f"{name}.{index}")
    elif callable(value) and not isinstance(value, Tensor):
        yield name, getattr(value, "__name__", type(value).__name__)
    else:
        yield name, value
