"""Multiply bulk bytes by one number of GF(2^8) and add them to others, with Intel's ISA-L, which pyeclib bundles.

``pip install rackrun[rs]`` installs pyeclib, whose wheels (x86_64, aarch64) contain the library; a system-wide copy
works as well. pyeclib's own calls are not used: they take all stripes of a row at once and return copies with headers,
while a row here adds each stripe as it arrives. Encoded alone, beside stripes of zeros, a stripe would go in at about 1
GB/s on a core. ISA-L's ``ec_encode_data_update`` adds one stripe in place, without the GIL, at 0.9 of the rate of XOR.
https://github.com/intel/isa-l/blob/master/include/erasure_code.h
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import importlib.metadata
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rackrun.checkpoint.base.errors import CheckpointError

__all__ = ["CodecMissing", "check", "is_here", "multiply_into"]

_TABLE_BYTES = 32
_BYTES_MAX = 2**30  # bytes of one call, which counts in 32 bits


class CodecMissing(CheckpointError):
    """Reed-Solomon is an optional extra, and is not installed."""


def check() -> None:
    """Raise `CodecMissing` when ISA-L is not installed."""
    _library()


def is_here() -> bool:
    """Whether ISA-L is installed."""
    try:
        check()
    except CodecMissing:
        return False
    return True


def multiply_into(target: NDArray[np.uint8], source: NDArray[np.uint8], factor: int) -> None:
    """Compute ``target ^= factor * source`` in GF(2^8), in place.

    Both are contiguous uint8 arrays of one length. Raises `CodecMissing` when ISA-L is not installed.
    """
    assert len(target) == len(source)
    assert target.flags.c_contiguous
    assert target.flags.writeable
    assert source.flags.c_contiguous
    library, table = _library(), _table(factor)
    for start in range(0, len(target), _BYTES_MAX):
        to, of = target[start : start + _BYTES_MAX], source[start : start + _BYTES_MAX]
        rows = (ctypes.c_void_p * 1)(to.ctypes.data)
        library.ec_encode_data_update(len(to), 1, 1, 0, table, of.ctypes.data, rows)


@functools.cache
def _library() -> Any:
    for find in (_bundled, functools.partial(ctypes.util.find_library, "isal")):  # the second one starts processes
        if (path := find()) is not None:
            try:
                library = ctypes.CDLL(path)
                library.ec_init_tables.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p]
                library.ec_encode_data_update.argtypes = [
                    *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int),
                    *(ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p),
                ]
            except (OSError, AttributeError):
                continue
            return library
    raise CodecMissing(
        "Reed-Solomon needs the library ISA-L, which is not installed here.",
        remedy="pip install rackrun[rs] on every host, or protect against the loss of one with xor.",
    )


def _bundled() -> str | None:
    """Return the path of the library in pyeclib's wheel; None when there is none."""
    try:
        files = importlib.metadata.files("pyeclib") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((str(file.locate()) for file in files if file.name.startswith("libisal")), None)


@functools.cache
def _table(factor: int) -> ctypes.Array[ctypes.c_char]:
    table = ctypes.create_string_buffer(_TABLE_BYTES)
    _library().ec_init_tables(1, 1, bytes([factor]), table)
    return table
