"""All state of a Megatron training other than what optimizers train and hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from rackrun.frameworks.megatron.refusals import inner_optimizers

__all__ = ["OtherState"]


class OtherState:
    """A tracked object: buffers and frozen parameters of the model, the loss scale, the position of the schedule, and
    the generators of tensor-parallel ranks.

    Parameters that are trained are not part of it: each step computes them from the main parameters. ``loaded`` is
    called when state has been put in place.
    """

    def __init__(self, chunks: Sequence[Any], optimizer: Any, scheduler: Any, loaded: Callable[[], None]) -> None:
        self._chunks, self._optimizer, self._scheduler, self._loaded = chunks, optimizer, scheduler, loaded
        self._model = [_Untrained(chunk) for chunk in chunks]

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors, numbers and dictionaries. The tensors are the objects in use, not copies."""
        return {
            "model": [model.tensors() for model in self._model],
            "training": [chunk.training for chunk in self._chunks],
            "scalers": [scaler.state_dict() for scaler in self._scalers()],
            "schedule": self._scheduler.num_steps if self._scheduler is not None else 0,
            "generators": get_cuda_rng_tracker().get_states(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put what `state_dict` returned in place."""
        with torch.no_grad():
            for model, tensors in zip(self._model, state["model"], strict=True):
                for name, tensor in model.tensors().items():
                    tensor.copy_(tensors[name])
        for chunk, training in zip(self._chunks, state["training"], strict=True):
            if chunk.training != training:
                chunk.train(training)
        for scaler, held in zip(self._scalers(), state["scalers"], strict=True):
            if held:
                scaler._scale = held["scale"].to(scaler._scale.device)
                scaler._growth_tracker, scaler._hysteresis_tracker = held["growth_tracker"], held["hysteresis_tracker"]
        if self._scheduler is not None:
            self._scheduler.num_steps = state["schedule"]  # the learning rates are options of the optimizers' groups
        if state["generators"]:
            get_cuda_rng_tracker().set_states({name: one.cpu() for name, one in state["generators"].items()})
        self._loaded()

    def _scalers(self) -> list[Any]:
        scalers = [getattr(one, "grad_scaler", None) for one in inner_optimizers(self._optimizer)]
        return [scaler for scaler in scalers if scaler is not None]


class _Untrained:
    """The buffers of a model chunk and its parameters that are frozen, found once: a walk through a large model takes
    as long as some kernels."""

    def __init__(self, chunk: Any) -> None:
        self._frozen = {name: one.detach() for name, one in chunk.named_parameters() if not one.requires_grad}
        self._buffers = [
            (f"{path}.{key}", module._buffers, key)
            for path, module in chunk.named_modules()
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return them by name, as the objects in use."""
        return self._frozen | {name: buffers[key] for name, buffers, key in self._buffers}
