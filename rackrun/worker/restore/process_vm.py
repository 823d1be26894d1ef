"""Reads the memory of another worker of this host straight into a tensor, with one copy by the kernel.

A socket on one host copies every byte twice, on two processors. `process_vm_readv` needs the same user, the same pid
namespace, and the kernel's permission to trace (Yama, seccomp). So it is tried first on a word whose value is known;
where it is refused, sockets are used.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from rackrun.worker.tensors.tensor_bytes import dense_bytes

__all__ = ["PeerProcess", "readable"]

_PR_SET_PTRACER, _ANYONE, _NOBODY = 0x59616D61, 2**64 - 1, 0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t


class _Span(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("length", ctypes.c_size_t))


@contextmanager
def readable(tensors: list[torch.Tensor]) -> Iterator[torch.Tensor | None]:
    """Context manager in which other workers of the same user may read ``tensors``, which Yama forbids otherwise.

    Yields the offer to send to them, a 1-d int64 tensor: 4 words of identification and one address for each tensor.
    Yields None when a tensor is not one block of host memory.
    """
    blocks = [dense_bytes(tensor) if tensor.device.type == "cpu" else None for tensor in tensors]
    if any(block is None for block in blocks):
        yield None
        return
    word = torch.tensor([secrets.randbits(62)], dtype=torch.int64)
    addresses = [block.data_ptr() for block in blocks if block is not None]
    with _allowed():
        yield torch.tensor([_host(), os.getpid(), word.data_ptr(), int(word), *addresses], dtype=torch.int64)


_openings = 0
_openings_lock = threading.Lock()


@contextmanager
def _allowed() -> Iterator[None]:
    """Permit tracing of this process. Openings are counted, because a restore whose plan was replaced may close
    late."""
    global _openings  # noqa: PLW0603 - the permission is the process's
    with _openings_lock:
        _openings += 1
        _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(_ANYONE), 0, 0, 0)
    try:
        yield
    finally:
        with _openings_lock:
            _openings -= 1
            if not _openings:
                _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(_NOBODY), 0, 0, 0)


class PeerProcess:
    """The worker that made an ``offer`` (see `readable`)."""

    def __init__(self, offer: torch.Tensor) -> None:
        self._host, self._pid, self._word_at, self._word, *self._addresses = offer.tolist()

    def is_there(self) -> bool:
        """Whether that worker is alive on this host and its memory can be read."""
        word = torch.zeros(1, dtype=torch.int64)
        try:
            if self._host != _host():
                return False
            self._copy(self._word_at, word.view(torch.uint8))
        except OSError:
            return False
        return bool(word == self._word)

    def read(self, tensor: int, start: int, into: torch.Tensor) -> None:
        """Read ``into.nbytes`` bytes, from the byte ``start`` of the offer's ``tensor``-th tensor. Raises `OSError`
        when the worker is gone."""
        self._copy(self._addresses[tensor] + start, into)

    def _copy(self, address: int, into: torch.Tensor) -> None:
        done = 0
        while done < into.nbytes:
            here = _Span(into.data_ptr() + done, into.nbytes - done)
            there = _Span(address + done, into.nbytes - done)
            count = _libc.process_vm_readv(self._pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
            if count <= 0:
                code = ctypes.get_errno()
                raise OSError(code, f"process_vm_readv of process {self._pid}: {os.strerror(code)}")
            done += count


def _host() -> int:
    """Return a number that is equal for processes of one user that see each other under the same pids."""
    boot = int(Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", "")[:12], 16)
    return boot ^ (os.stat("/proc/self/ns/pid").st_ino << 12) ^ os.getuid()
