"""Encodes the state of a stream as text, without pickle, and computes digests of micro-batches."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from rackrun.errors import UsageError

__all__ = ["decode_state", "digest_of", "encode_state"]

_KIND = "__rackrun__"
"""Key of the dictionaries that stand for what JSON has no type for."""


def encode_state(state: Any) -> bytes:
    """Return ``state``, what a ``state_dict()`` has returned, as JSON.

    It may consist of numbers, texts, bytes, None, lists, tuples, dictionaries, tensors, and arrays and numbers of
    NumPy. Raises `UsageError` with the path of anything else.
    """
    return json.dumps(_encoded(state, "state"), separators=(",", ":")).encode()


def decode_state(text: bytes) -> Any:
    """Return the state that `encode_state` was given: equal, and with the same types."""
    return _decoded(json.loads(text))


def _encoded(value: Any, path: str) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_encoded(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if kind is tuple:
        return {_KIND: "tuple", "of": [_encoded(item, f"{path}[{index}]") for index, item in enumerate(value)]}
    if isinstance(value, dict):
        if all(type(key) is str for key in value) and _KIND not in value:
            return {key: _encoded(item, f"{path}[{key!r}]") for key, item in value.items()}
        pairs = [[_encoded(key, path), _encoded(item, f"{path}[{key!r}]")] for key, item in value.items()]
        return {_KIND: "dict", "of": pairs}
    if kind is bytes:
        return {_KIND: "bytes", "of": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return {
            _KIND: "tensor",
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
            "of": base64.b64encode(_bytes_of(value)).decode(),
        }
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        scalar = isinstance(value, np.generic)
        return {
            _KIND: "scalar" if scalar else "array",
            "dtype": value.dtype.str,
            "shape": list(value.shape),
            "of": base64.b64encode(value.tobytes()).decode(),
        }
    raise UsageError(
        f"the state of a stream holds a {kind.__module__}.{kind.__qualname__} at {path}, which cannot be kept.",
        remedy="return numbers, texts, bytes, lists, tuples, dictionaries, tensors and NumPy arrays from state_dict(); "
        "or give run.stream state_every=0, and the stream is read again from its beginning.",
    )


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind is None:
        return {key: _decoded(item) for key, item in value.items()}
    of = value["of"]
    if kind == "tuple":
        return tuple(map(_decoded, of))
    if kind == "dict":
        return {_decoded(key): _decoded(item) for key, item in of}
    raw = base64.b64decode(of)
    if kind == "bytes":
        return raw
    if kind == "tensor":
        dtype = getattr(torch, value["dtype"])
        flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        return flat.reshape(value["shape"])
    array = np.frombuffer(bytearray(raw), dtype=np.dtype(value["dtype"])).reshape(value["shape"])
    return array[()] if kind == "scalar" else array


def digest_of(batch: Any) -> int:
    """Return a digest of 63 bits of a micro-batch: of the bytes of its tensors and arrays, and of its numbers and
    texts. Of an object of another class it covers the class alone."""
    mixed = hashlib.blake2b(digest_size=8)
    _mix(batch, mixed.update)
    return int.from_bytes(mixed.digest(), "little") >> 1


def _mix(value: Any, update: Callable[[bytes], None]) -> None:
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        update(f"{value.dtype}{tuple(value.shape)}".encode())
        update(_bytes_of(value))
    elif isinstance(value, np.ndarray) and value.dtype.kind != "O":
        update(f"{value.dtype.str}{value.shape}".encode())
        update(value.tobytes())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            update(f"{key!r}:".encode())
            _mix(item, update)
    elif isinstance(value, (list, tuple)):
        update(f"{len(value)}[".encode())
        for item in value:
            _mix(item, update)
    elif isinstance(value, bytes):
        update(value)
    elif value is None or isinstance(value, (bool, int, float, complex, str, np.generic)):
        update(repr(value).encode())
    else:
        update(type(value).__qualname__.encode())


def _bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""
