"""Fault in the pages of a mapped file ahead of use, with several threads, while all other threads continue.

`mmap.MAP_POPULATE` and `mmap.madvise` hold Python's lock until the last page is there: for large memory, nothing else
in the process runs for seconds. Here the kernel is called without that lock, and for one piece after the other, because
a thread that maps or unmaps memory meanwhile waits for the pieces in progress.

``posix_fallocate`` is not called first, since it allocates in one thread only. Populating also reports missing memory
as an error, where a thread that touches a page would get SIGBUS.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from rackrun.checkpoint.base.errors import CheckpointError

__all__ = ["BY_ITSELF", "PIECE_BYTES", "Populating", "populate"]

PIECE_BYTES = 8 * 2**20
"""Size of a piece: a few milliseconds of one core, for which a thread that maps memory may wait."""
_MADV_POPULATE_WRITE = 23
"""Available in Linux 5.14 and later."""
_MAP_FIXED = 0x10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p


@dataclass(frozen=True)
class Populating:
    """How many threads populate. ``wanted`` is called before each piece; False stops with an error."""

    threads: int = 1
    wanted: Callable[[], bool] = lambda: True


BY_ITSELF = Populating()
"""Populate in the calling thread alone, to the end."""


def populate(fd: int, address: int, size: int, how: Populating = BY_ITSELF) -> None:
    """Allocate the first ``size`` bytes of ``fd``, which are mapped writable and shared at ``address``.

    Returns when all pages are there. Raises `OSError` when there is no memory for them, and `CheckpointError` when
    ``how.wanted`` returns False. All its threads have ended then.
    """
    pieces = iter(range(0, size, PIECE_BYTES))
    taking = threading.Lock()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            while not failed:
                with taking:
                    start = next(pieces, None)
                if start is None:
                    return
                if not how.wanted():
                    raise CheckpointError(
                        "the allocation was given up, because the memory is no longer needed.", remedy="none needed."
                    )
                _have(fd, address, start, min(PIECE_BYTES, size - start))
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    helpers = [
        threading.Thread(target=work, name=f"rackrun-populate-{number}", daemon=True)
        for number in range(1, min(how.threads, -(-size // PIECE_BYTES)))
    ]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    if failed:
        raise failed[0]


def _have(fd: int, address: int, start: int, size: int) -> None:
    """Fault in one piece. Kernels without MADV_POPULATE_WRITE map it anew with MAP_POPULATE."""
    if _libc.madvise(address + start, size, _MADV_POPULATE_WRITE) == 0:
        return
    os.posix_fallocate(fd, start, size)  # raises the reason, where there is no memory
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE | _MAP_FIXED
    mapped = _libc.mmap(address + start, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, start)
    if mapped != address + start:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
