"""A GradScaler as a tracked object whose state is told as the tensors that it holds.

Its own ``state_dict`` turns them into numbers, for which the host waits until the device has come there; rackrun asks before and after every
step. Here they stay where they are, and are numbers only when the state is put in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.amp import GradScaler

__all__ = ["ScalerState", "scaler_as_tracked"]


class ScalerState:
    """Of ``scaler``."""

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler

    def state_dict(self) -> dict[str, Any]:
        """As the scaler's own, but with its scale (fp32) and its growth tracker (int32) as tensors of no dimension, on its device. Those of a
        scaler that has not scaled yet are made for this answer."""
        scaler = self._scaler
        if not scaler.is_enabled():
            return {}
        return {
            "scale": self._tensor(scaler._scale, scaler._init_scale, torch.float32),
            "growth_factor": scaler._growth_factor,
            "backoff_factor": scaler._backoff_factor,
            "growth_interval": scaler._growth_interval,
            "_growth_tracker": self._tensor(scaler._growth_tracker, scaler._init_growth_tracker, torch.int32),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` gives, or the scaler's own."""
        if state:
            numbers = {"scale": float(state["scale"]), "_growth_tracker": int(state["_growth_tracker"])}
            self._scaler.load_state_dict({**state, **numbers})

    def marks(self) -> list[tuple[float, int]]:
        """Equal as long as nothing was seen to be written to its tensors."""
        scaler, found = self._scaler, list[tuple[float, int]]()
        for held, first in ((scaler._scale, scaler._init_scale), (scaler._growth_tracker, scaler._init_growth_tracker)):
            found.append((first, -1) if held is None else (held.data_ptr(), held._version))
        return found

    def forget_unscaled(self) -> None:
        """Which optimizers' gradients were unscaled in a step that does not count."""
        self._scaler._per_optimizer_states.clear()

    def _tensor(self, held: torch.Tensor | None, first: float, dtype: torch.dtype) -> torch.Tensor:
        return held if held is not None else torch.full((), first, dtype=dtype, device=self._scaler._device)


def scaler_as_tracked(thing: Any) -> Any:
    """``thing``, or, when it is a GradScaler whose state is torch's own, its `ScalerState`."""
    own = isinstance(thing, GradScaler) and type(thing).state_dict is GradScaler.state_dict
    return ScalerState(thing) if own else thing
