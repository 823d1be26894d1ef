"""The processes of a torch DataLoader, torch 2.10 to 2.15: ended at once, whatever they are fetching, and without files."""

from __future__ import annotations

import os
import secrets
import signal
import threading
from multiprocessing import connection
from typing import Any

import torch

__all__ = ["end_workers", "leave_no_folders", "stay"]

_usual_address = connection.arbitrary_address  # type: ignore[attr-defined]


def leave_no_folders() -> None:
    """From now on sockets of Python's multiprocessing, over which tensors come from loader processes, have names that are no files (Linux's abstract ones; whoever connects has
    to know the process's key, as before). Each process would make a folder for them in TMPDIR, and remove it at an end that neither a loader process nor who is killed has."""
    connection.arbitrary_address = _address  # type: ignore[attr-defined]


def _address(family: str) -> Any:
    if family == "AF_UNIX":
        return f"\0rackrun-{os.getpid()}-{secrets.token_hex(8)}"
    return _usual_address(family)


_FOR_THE_AGENT = {signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}


def stay(worker: int) -> None:
    """A ``worker_init_fn``: what a scheduler sends to every process of a job does not end it; torch would take that for a failure of the script.
    What its parent sends does, at once."""
    del worker
    signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_AGENT)
    threading.Thread(target=_until_told, args=[os.getppid()], name="rackrun-signals", daemon=True).start()


def _until_told(parent: int) -> None:
    while True:
        heard = signal.sigwaitinfo(_FOR_THE_AGENT)
        if (heard.si_signo, heard.si_pid) == (signal.SIGTERM, parent):
            os._exit(0)


def end_workers(iteration: Any) -> None:
    """Of one iteration over a DataLoader, which is over with it. torch's own way waits until each has done what it was asked for."""
    if getattr(iteration, "_worker_pids_set", False):
        torch._C._remove_worker_pids(id(iteration))  # how they end is no failure any more
        iteration._worker_pids_set = False
    for process in getattr(iteration, "_workers", ()):
        process.kill()
    if hasattr(iteration, "_shutdown_workers"):
        iteration._shutdown_workers()
