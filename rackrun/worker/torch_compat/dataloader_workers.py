"""Keeps the processes that load data from signals that are for the agent, and ends those of a torch DataLoader at once
(torch 2.10 to 2.15), whatever they are fetching, and without leaving files."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import connection
from typing import Any

import torch
from torch.utils.data import DataLoader

__all__ = ["children_stay", "end_workers", "leave_no_folders", "let_workers_stay", "stay"]

_usual_address = connection.arbitrary_address  # type: ignore[attr-defined]


def leave_no_folders() -> None:
    """Give sockets of Python's multiprocessing, over which tensors come from loader processes, names without files
    (Linux's abstract ones).

    Connecting still requires the process's key. Otherwise each process would make a folder for its sockets in TMPDIR
    and remove it at its exit, which neither loader processes nor killed processes reach.
    """
    connection.arbitrary_address = _address  # type: ignore[attr-defined]


def _address(family: str) -> Any:
    if family == "AF_UNIX":
        return f"\0rackrun-{os.getpid()}-{secrets.token_hex(8)}"
    return _usual_address(family)


_FOR_THE_AGENT = {signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}


def stay(worker: int) -> None:
    """A ``worker_init_fn``. Signals that a scheduler sends to every process of a job do not end the loader process,
    because torch would take that for a failure of the script. SIGTERM of its parent ends it at once."""
    del worker
    signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_AGENT)
    threading.Thread(target=_until_told, args=[os.getppid()], name="rackrun-signals", daemon=True).start()


def _until_told(parent: int) -> None:
    while True:
        heard = signal.sigwaitinfo(_FOR_THE_AGENT)
        if (heard.si_signo, heard.si_pid) == (signal.SIGTERM, parent):
            os._exit(0)


class _Thread(threading.local):
    children_stay = False
    """Whether a process that this thread forks is one for `stay`."""


_thread = _Thread()


@contextlib.contextmanager
def children_stay() -> Iterator[None]:
    """Context in which processes that this thread starts survive signals sent to the whole job.

    They begin with these signals blocked. A forked one also ends at SIGTERM of its parent, as with `stay`.
    """
    was, _thread.children_stay = _thread.children_stay, True
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_AGENT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _thread.children_stay = was


def _forked() -> None:
    if _thread.children_stay:
        _thread.children_stay = False
        stay(0)


os.register_at_fork(after_in_child=_forked)


class _Stays:
    """`stay`, and then the script's own ``worker_init_fn``."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        stay(worker)
        if self._then is not None:
            self._then(worker)


def let_workers_stay(loader: Any) -> None:
    """Let the processes of ``loader`` begin with `stay` if it is a DataLoader, however they are started."""
    if isinstance(loader, DataLoader) and not isinstance(loader.worker_init_fn, _Stays):
        loader.worker_init_fn = _Stays(loader.worker_init_fn)


def end_workers(iteration: Any) -> None:
    """Kill the processes of one iteration over a DataLoader, which ends the iteration. torch's own way waits until each
    has done what it was asked for."""
    if getattr(iteration, "_worker_pids_set", False):
        torch._C._remove_worker_pids(id(iteration))  # their exit is no failure any more
        iteration._worker_pids_set = False
    for process in getattr(iteration, "_workers", ()):
        process.kill()
    if hasattr(iteration, "_shutdown_workers"):
        iteration._shutdown_workers()
