"""The plain part of an image: what is no tensor, as msgpack, with room to grow a little without a new layout."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from rackrun.checkpoint.base.errors import IntegrityError

__all__ = ["OptimizerPlain", "Plain", "decode_plain", "pack_plain", "with_elsewhere"]

_LENGTH = struct.Struct("<Q")
_ROOM = 1024
"""It is padded to a multiple of this, so that a counter that grows by a digit does not change the layout."""


class OptimizerPlain(msgspec.Struct, frozen=True):
    groups: list[dict[str, Any]]
    state: dict[str, dict[str, Any]]
    """Parameter -> what is no tensor."""
    tensors: dict[str, dict[str, tuple[bool, bool]]]
    """Parameter -> key -> (of the parameter's shape, on the CPU)."""


class Plain(msgspec.Struct, frozen=True):
    optimizers: dict[str, OptimizerPlain]
    values: dict[str, Any]
    elsewhere: dict[str, int] = {}
    """Tensor of this rank -> the rank whose shard has it: replicas share the writing (`rackrun.checkpoint.manager.replica_writers`)."""


class _Encoded(msgspec.Struct, frozen=True):
    """The same, its parts as they are."""

    optimizers: msgspec.Raw
    values: msgspec.Raw
    elsewhere: dict[str, int] = {}


def pack_plain(plain: Plain) -> bytes:
    """Raises what msgpack does for values that it does not know."""
    return _pack(msgspec.msgpack.encode(plain))


def decode_plain(part: bytes) -> Plain:
    """Raises `IntegrityError` for what nobody has packed."""
    with _typed():
        return msgspec.msgpack.decode(_encoded(part), type=Plain, strict=False)


def with_elsewhere(part: bytes, elsewhere: Mapping[str, int]) -> bytes:
    """The same plain part, but for where other tensors are."""
    with _typed():
        plain = msgspec.msgpack.decode(_encoded(part), type=_Encoded)
    return _pack(msgspec.msgpack.encode(msgspec.structs.replace(plain, elsewhere=dict(elsewhere))))


@contextlib.contextmanager
def _typed() -> Iterator[None]:
    try:
        yield
    except (msgspec.MsgspecError, ValueError, struct.error, RecursionError) as error:
        raise IntegrityError(
            f"the plain part of the image cannot be read: {error!s:.300}.", remedy="use another generation."
        ) from error


def _pack(encoded: bytes) -> bytes:
    return (_LENGTH.pack(len(encoded)) + encoded).ljust(-(-(_LENGTH.size + len(encoded)) // _ROOM) * _ROOM, b"\0")


def _encoded(part: bytes) -> bytes:
    (length,) = _LENGTH.unpack_from(part)
    return part[_LENGTH.size : _LENGTH.size + length]
