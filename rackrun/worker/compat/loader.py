"""The processes of a torch DataLoader, torch 2.10 to 2.13: ended at once, whatever they are fetching."""

from __future__ import annotations

import signal
from typing import Any

import torch

__all__ = ["end_workers", "stay"]

_FOR_THE_AGENT = {signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}


def stay(worker: int) -> None:
    """A ``worker_init_fn``: what a scheduler sends to every process of a job does not end it; torch would take that for a failure of the script."""
    del worker
    signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_AGENT)


def end_workers(iteration: Any) -> None:
    """Of one iteration over a DataLoader, which is over with it. torch's own way waits until each has done what it was asked for."""
    if getattr(iteration, "_worker_pids_set", False):
        torch._C._remove_worker_pids(id(iteration))  # how they end is no failure any more
        iteration._worker_pids_set = False
    for process in getattr(iteration, "_workers", ()):
        process.kill()
    if hasattr(iteration, "_shutdown_workers"):
        iteration._shutdown_workers()
