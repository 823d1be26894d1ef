"""Raises an error in the main thread from another one, even where the main thread waits for a lock or a queue."""

from __future__ import annotations

import signal
import threading

__all__ = ["arm", "interrupt_main"]

_SIGNAL = signal.SIGURG  # ignored by default, and nothing sends it to a process without such sockets
_errors: list[Exception] = []


def arm() -> None:
    """Let `interrupt_main` work. To be called in the main thread. Does nothing where the script handles the signal."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(_SIGNAL) is signal.SIG_DFL:
        signal.signal(_SIGNAL, _raise)


def interrupt_main(error: Exception) -> None:
    """Raise ``error`` in the main thread as soon as it runs Python code, or waits in Python."""
    _errors.append(error)
    if (main := threading.main_thread().ident) is not None and signal.getsignal(_SIGNAL) is _raise:
        signal.pthread_kill(main, _SIGNAL)


def _raise(*_: object) -> None:
    if _errors:
        raise _errors.pop()
