"""Observes FSDP2's waits (torch 2.10 to 2.15): it waits for collectives by events of its own streams, not by rackrun's
works."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

__all__ = ["watch_waits"]

_FSDP = "torch.distributed.fsdp."


def watch_waits(around: Callable[[], AbstractContextManager[None]]) -> None:
    """Enter ``around()`` during each wait that FSDP2 adds to the current stream. Waits of its own streams delay no
    computation and are left out."""
    wait_event = torch.cuda.Stream.wait_event

    def watched(self: torch.cuda.Stream, event: Any) -> None:
        by_fsdp = sys._getframe(1).f_globals.get("__name__", "").startswith(_FSDP)
        if not by_fsdp or self != torch.cuda.current_stream(self.device):
            wait_event(self, event)
            return
        with around():
            wait_event(self, event)

    torch.cuda.Stream.wait_event = watched  # type: ignore[method-assign]
