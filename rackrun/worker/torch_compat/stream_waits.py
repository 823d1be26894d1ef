"""FSDP2's waits, torch 2.10 to 2.15: it waits for its collectives by events of its own streams, and asks no work of ours."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

__all__ = ["watch_waits"]

_FSDP = "torch.distributed.fsdp."


def watch_waits(around: Callable[[], AbstractContextManager[None]]) -> None:
    """``around`` each wait that FSDP has the current stream do. Those of its own streams hold up nothing that is computed."""
    wait_event = torch.cuda.Stream.wait_event

    def watched(self: torch.cuda.Stream, event: Any) -> None:
        by_fsdp = sys._getframe(1).f_globals.get("__name__", "").startswith(_FSDP)
        if not by_fsdp or self != torch.cuda.current_stream(self.device):
            wait_event(self, event)
            return
        with around():
            wait_event(self, event)

    torch.cuda.Stream.wait_event = watched  # type: ignore[method-assign]
