"""The plain part of an image: state that is not tensors, as msgpack, padded so that it can grow in the same layout."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from rackrun.checkpoint.base.errors import IntegrityError

__all__ = ["OptimizerPlain", "Plain", "decode_plain", "pack", "pack_plain", "unpack", "with_elsewhere"]

T = TypeVar("T")

_LENGTH = struct.Struct("<Q")
_ROOM = 1024
"""The plain part is padded to a multiple of this many bytes, so that one more digit does not change the layout."""


class OptimizerPlain(msgspec.Struct, frozen=True):
    """The part of an optimizer's state that is not tensors."""

    groups: list[dict[str, Any]]
    state: dict[str, dict[str, Any]]
    """Parameter -> the values of its state that are not tensors."""
    tensors: dict[str, dict[str, tuple[bool, bool]]]
    """Parameter -> key of a state tensor -> (whether it has the parameter's shape, whether it is on the CPU)."""


class Plain(msgspec.Struct, frozen=True):
    """A rank's state that is not tensors."""

    optimizers: dict[str, OptimizerPlain]
    values: dict[str, Any]
    elsewhere: dict[str, int] = {}
    """Tensor of this rank -> the rank whose shard stores it.

    Replicas share the writing (`rackrun.checkpoint.manager.replica_writers`).
    """


class _Encoded(msgspec.Struct, frozen=True):
    """A `Plain` whose parts stay encoded."""

    optimizers: msgspec.Raw
    values: msgspec.Raw
    elsewhere: dict[str, int] = {}


def pack_plain(plain: Plain) -> bytes:
    """Encode a plain part. Raises msgspec's errors for values that msgpack cannot represent."""
    return pack(msgspec.msgpack.encode(plain))


def decode_plain(part: bytes) -> Plain:
    """Decode a plain part. Raises `IntegrityError` for bytes that are no plain part."""
    return unpack(part, Plain, strict=False)


def with_elsewhere(part: bytes, elsewhere: Mapping[str, int]) -> bytes:
    """Return the encoded plain part ``part`` with its field `Plain.elsewhere` replaced by ``elsewhere``.

    Raises `IntegrityError` for bytes that are no plain part.
    """
    plain = msgspec.structs.replace(unpack(part, _Encoded), elsewhere=dict(elsewhere))
    return pack(msgspec.msgpack.encode(plain))


def pack(encoded: bytes) -> bytes:
    """Return msgpack bytes as the plain part of an image: with their length before them, and padded."""
    return (_LENGTH.pack(len(encoded)) + encoded).ljust(-(-(_LENGTH.size + len(encoded)) // _ROOM) * _ROOM, b"\0")


def unpack(part: bytes, kind: type[T], *, strict: bool = True) -> T:
    """Decode what `pack` has packed as a ``kind``. Raises `IntegrityError` for other bytes."""
    try:
        (length,) = _LENGTH.unpack_from(part)
        return msgspec.msgpack.decode(part[_LENGTH.size : _LENGTH.size + length], type=kind, strict=strict)
    except (msgspec.MsgspecError, ValueError, struct.error, RecursionError) as error:
        raise IntegrityError(
            f"the values that are not tensors in this checkpoint or snapshot cannot be read: {error!s:.300}.",
            remedy="use another copy of this shard, or an older checkpoint.",
        ) from error
