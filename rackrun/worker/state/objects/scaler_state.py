"""Tracks a GradScaler by the tensors that it holds, without making the host wait for the device.

The scaler's own ``state_dict`` converts the tensors to numbers, for which the host must wait, and rackrun reads the
state before and after every step. Here they stay tensors, and become numbers only when the state is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.amp import GradScaler

__all__ = ["ScalerState", "scaler_as_tracked"]


class ScalerState:
    """A tracked object for ``scaler``."""

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's own ``state_dict``, but with its scale (fp32) and growth tracker (int32) as 0-d tensors
        on its device. For a scaler that has not scaled yet they are created for this call."""
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
        """Load what `state_dict` returns, or what the scaler's own ``state_dict`` returns."""
        if state:
            numbers = {"scale": float(state["scale"]), "_growth_tracker": int(state["_growth_tracker"])}
            self._scaler.load_state_dict({**state, **numbers})

    def marks(self) -> list[tuple[float, int]]:
        """Return addresses and versions of its tensors: equal as long as no write to them was noticed."""
        scaler, found = self._scaler, list[tuple[float, int]]()
        for held, first in ((scaler._scale, scaler._init_scale), (scaler._growth_tracker, scaler._init_growth_tracker)):
            found.append((first, -1) if held is None else (held.data_ptr(), held._version))
        return found

    def forget_unscaled(self) -> None:
        """Forget which optimizers' gradients were unscaled, in a step that does not count."""
        self._scaler._per_optimizer_states.clear()

    def _tensor(self, held: torch.Tensor | None, first: float, dtype: torch.dtype) -> torch.Tensor:
        return held if held is not None else torch.full((), first, dtype=dtype, device=self._scaler._device)


def scaler_as_tracked(thing: Any) -> Any:
    """Return a `ScalerState` for a GradScaler whose state is torch's own, and any other ``thing`` unchanged."""
    own = isinstance(thing, GradScaler) and type(thing).state_dict is GradScaler.state_dict
    return ScalerState(thing) if own else thing
