"""Robust mutex by which an agent learns within a millisecond, without polling, that a worker has begun to die.

The worker's main thread holds a *robust* mutex in its heartbeat page for its whole life. When a process dies, in
whatever way, the kernel releases such mutexes before it tears down the memory, which takes tens of milliseconds per
gigabyte, and seconds if a GPU pins it. A thread that waits for the mutex wakes with EOWNERDEAD (``man
pthread_mutexattr_setrobust``). The agent has such a thread.
"""

from __future__ import annotations

import ctypes
import errno
import threading
from collections.abc import Callable

from rackrun.link.heartbeat_page import HeartbeatPage

__all__ = ["hold", "held", "wait_in_thread"]

_PTHREAD_PROCESS_SHARED = 1
_PTHREAD_MUTEX_ROBUST = 1

_libc = ctypes.CDLL(None)


def hold(page: HeartbeatPage) -> None:
    """Take the mutex. Call it once, in a worker's main thread. The page must stay mapped until the process ends.

    Raises OSError if the C library has no robust mutexes.
    """
    mutex = ctypes.c_void_p(page.lifeline_address)
    attributes = ctypes.create_string_buffer(64)
    _check(_libc.pthread_mutexattr_init(attributes))
    _check(_libc.pthread_mutexattr_setpshared(attributes, _PTHREAD_PROCESS_SHARED))
    _check(_libc.pthread_mutexattr_setrobust(attributes, _PTHREAD_MUTEX_ROBUST))
    _check(_libc.pthread_mutex_init(mutex, attributes))
    _check(_libc.pthread_mutex_lock(mutex))
    page.lifeline_held = True


def held(page: HeartbeatPage) -> bool:
    """Return whether a worker holds the mutex, so that waiting for it makes sense."""
    return page.lifeline_held


def wait_in_thread(page: HeartbeatPage, name: str, released: Callable[[], None]) -> None:
    """Call ``released``, from another thread, when the worker that holds the page's mutex begins to die."""

    def wait() -> None:
        mutex = ctypes.c_void_p(page.lifeline_address)
        outcome = _libc.pthread_mutex_lock(mutex)  # without the GIL
        if outcome == errno.EOWNERDEAD:
            _libc.pthread_mutex_consistent(mutex)
        if outcome in (0, errno.EOWNERDEAD):
            _libc.pthread_mutex_unlock(mutex)
        released()

    threading.Thread(target=wait, name=name, daemon=True).start()


def _check(code: int) -> None:
    if code != 0:
        raise OSError(code, f"robust mutex: {errno.errorcode.get(code, code)}")
