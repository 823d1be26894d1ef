"""Values of a loop as text, and back: numbers, texts, lists, tuples, dictionaries, and tensors with their bits."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import torch

from rackrun.errors import UsageError

__all__ = ["TENSOR_BYTES_MAX", "decoded", "encoded"]

TENSOR_BYTES_MAX = 2**20
"""The most that one tensor may hold: every step sends its loop's values to all ranks."""
_TENSOR, _TUPLE, _PAIRS, _PATH = "tensor:", "tuple:", "pairs:", "path:"
_TAGS = {_TENSOR, _TUPLE, _PAIRS, _PATH}


def encoded(value: Any, of: str) -> str:
    """Return ``value`` as JSON. ``of``: who keeps it, for a message. Raises `UsageError` for what is not plain."""
    return json.dumps(_plain(value, of), sort_keys=False)


def decoded(text: str, device: torch.device) -> Any:
    """Return what `encoded` was given, with tensors on ``device``."""
    return _back(json.loads(text), device)


def _plain(value: Any, of: str) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        return {_TENSOR: _bits(value, of)}
    if isinstance(value, list):
        return [_plain(one, of) for one in value]
    if isinstance(value, tuple):
        return {_TUPLE: [_plain(one, of) for one in value]}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and not _TAGS & value.keys():
            return {key: _plain(one, of) for key, one in value.items()}
        return {_PAIRS: [[_plain(key, of), _plain(one, of)] for key, one in value.items()]}
    if isinstance(value, Path):
        return {_PATH: str(value)}
    if callable(getattr(value, "item", None)) and getattr(value, "ndim", None) == 0:  # a number of numpy's
        return value.item()
    raise UsageError(
        f"{of} keeps a {type(value).__name__}, which a process that takes a rank over could not be given.",
        remedy="keep numbers, texts, tensors, lists and dictionaries of them there.",
    )


def _bits(tensor: torch.Tensor, of: str) -> list[Any]:
    size = tensor.numel() * tensor.element_size()
    if size > TENSOR_BYTES_MAX:
        raise UsageError(
            f"{of} keeps a tensor of {size} bytes between two steps, which every step would send to all ranks.",
            remedy=f"keep sums or means instead, of at most {TENSOR_BYTES_MAX} bytes.",
        )
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return [
        str(tensor.dtype).removeprefix("torch."),
        list(tensor.shape),
        base64.b64encode(flat.numpy().tobytes()).decode(),
    ]


def _back(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_back(one, device) for one in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (tag, content), *_ = value.items()
        if tag == _TENSOR:
            return _tensor(content, device)
        if tag == _TUPLE:
            return tuple(_back(one, device) for one in content)
        if tag == _PAIRS:
            return {_back(key, device): _back(one, device) for key, one in content}
        if tag == _PATH:
            return Path(content)
    return {key: _back(one, device) for key, one in value.items()}


def _tensor(content: list[Any], device: torch.device) -> torch.Tensor:
    dtype, shape, text = content
    kind = getattr(torch, dtype)
    bits = bytearray(base64.b64decode(text))
    flat = torch.frombuffer(bits, dtype=torch.uint8).clone().view(kind) if bits else torch.empty(0, dtype=kind)
    return flat.reshape(shape).to(device)
