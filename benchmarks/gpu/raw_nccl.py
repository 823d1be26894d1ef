"""NCCL's own functions, of the library that torch has loaded, for what torch does not offer: a communicator made out of another one.

All calls block, and communicators are of the calling thread's current GPU. Source: ``nccl.h`` of 2.27.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

__all__ = ["RawCommunicator", "RawNccl"]

_UNIQUE_ID_BYTES = 128
_INT32 = 2
"""``ncclInt32``."""


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * _UNIQUE_ID_BYTES)]


class RawNccl:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        pointer, whole, out = ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p)
        for name, arguments in {
            "ncclGetUniqueId": [ctypes.POINTER(_UniqueId)],
            "ncclCommInitRank": [out, whole, _UniqueId, whole],
            "ncclCommShrink": [pointer, ctypes.POINTER(whole), whole, out, pointer, whole],
            "ncclCommSplit": [pointer, whole, whole, out, pointer],
            "ncclAllGather": [pointer, pointer, ctypes.c_size_t, whole, pointer, pointer],
            "ncclCommDestroy": [pointer],
            "ncclCommAbort": [pointer],
        }.items():
            function = getattr(library, name, None)
            if function is not None:
                function.argtypes, function.restype = arguments, ctypes.c_int

    def lacks(self, *names: str) -> list[str]:
        return [name for name in names if not hasattr(self._library, name)]

    def unique_id(self) -> bytes:
        one = _UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(one))
        return bytes(ctypes.string_at(ctypes.byref(one), _UNIQUE_ID_BYTES))

    def connect(self, unique_id: bytes, size: int, rank: int) -> RawCommunicator:
        made = ctypes.c_void_p()
        self.call("ncclCommInitRank", ctypes.byref(made), size, _UniqueId.from_buffer_copy(unique_id), rank)
        return RawCommunicator(self, made)

    def call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._library, name)(*arguments)
        if result != 0:
            raise RuntimeError(f"{name} gives {result}")


class RawCommunicator:
    def __init__(self, nccl: RawNccl, handle: ctypes.c_void_p) -> None:
        self._nccl, self._handle = nccl, handle

    def without(self, ranks: Sequence[int]) -> RawCommunicator:
        """Of the others, in their order. They call it, ``ranks`` do not."""
        made, excluded = ctypes.c_void_p(), (ctypes.c_int * len(ranks))(*ranks)
        self._nccl.call("ncclCommShrink", self._handle, excluded, len(ranks), ctypes.byref(made), None, 0)
        return RawCommunicator(self._nccl, made)

    def ordered(self, key: int) -> RawCommunicator:
        """Of the same ranks, in the order of their keys."""
        made = ctypes.c_void_p()
        self._nccl.call("ncclCommSplit", self._handle, 0, key, ctypes.byref(made), None)
        return RawCommunicator(self._nccl, made)

    def gather(self, send: int, receive: int, count: int, stream: int) -> None:
        """Enqueue: ``count`` int32 of each rank, in the order of ranks. Addresses of the device."""
        self._nccl.call("ncclAllGather", send, receive, count, _INT32, self._handle, stream)

    def drop(self) -> None:
        self._nccl.call("ncclCommDestroy", self._handle)

    def abort(self) -> None:
        self._nccl.call("ncclCommAbort", self._handle)
