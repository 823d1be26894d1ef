"""The processes of a torch DataLoader, torch 2.10 to 2.15: ended at once, whatever they are fetching."""

from __future__ import annotations

from typing import Any

__all__ = ["end_workers"]


def end_workers(iteration: Any) -> None:
    """Of one iteration over a DataLoader, which is over with it. torch's own way waits until each has done what it was asked for."""
    for process in getattr(iteration, "_workers", ()):
        process.terminate()  # a signal of their parent's is a good end to them
    if hasattr(iteration, "_shutdown_workers"):
        iteration._shutdown_workers()
