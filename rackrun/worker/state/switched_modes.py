"""Which modes of tracked modules a script has switched since ``run.steps``: ``requires_grad``, and train or eval."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from rackrun.worker.state.state_manifest import ModelModes
from rackrun.worker.tensors import module_walk

__all__ = ["SwitchedModes"]


class SwitchedModes:
    """The modes of the tracked modules. ``parameters``: all of them by path; ``modules``: the tracked ones by name."""

    def __init__(self) -> None:
        self._of_main, self._filled = ModelModes(), ModelModes()
        """The modes at ``run.steps``, and those in the manifest that the state was filled from last."""

    def begin(self, parameters: Mapping[str, torch.Tensor], modules: Mapping[str, nn.Module]) -> None:
        """Record the modes as ``main`` has set them, at ``run.steps``."""
        self._of_main = _modes_now(parameters, modules)

    def switched(self, parameters: Mapping[str, torch.Tensor], modules: Mapping[str, nn.Module]) -> ModelModes:
        """Return the modes switched since ``run.steps``, on this rank or on the one that this state comes from."""
        now, main, filled = _modes_now(parameters, modules), self._of_main, self._filled
        return ModelModes(
            _switched(now.requires_grad, main.requires_grad, filled.requires_grad),
            _switched(now.training, main.training, filled.training),
        )

    def put(self, modes: ModelModes, parameters: Mapping[str, torch.Tensor], modules: Mapping[str, nn.Module]) -> None:
        """Switch the modes to ``modes``, which another rank's `switched` has returned, and all others to those of
        ``main``."""
        self._filled = modes
        trains = {**self._of_main.requires_grad, **modes.requires_grad}
        for path, parameter in parameters.items():
            wanted = trains.get(path, parameter.requires_grad)
            if parameter.requires_grad != wanted:
                parameter.requires_grad_(wanted)
        training = {**self._of_main.training, **modes.training}
        for path, module in _by_path(modules):
            module.training = training.get(path, module.training)


def _modes_now(parameters: Mapping[str, torch.Tensor], modules: Mapping[str, nn.Module]) -> ModelModes:
    return ModelModes(
        {path: parameter.requires_grad for path, parameter in parameters.items()},
        {path: module.training for path, module in _by_path(modules)},
    )


def _by_path(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for name, root in modules.items():
        for path, module in module_walk.modules(root):
            yield f"{name}/{path}", module


def _switched(now: Mapping[str, bool], main: Mapping[str, bool], filled: Mapping[str, bool]) -> dict[str, bool]:
    """Return the modes that differ from ``main``, and those that were switched already where this state was filled from
    and still are."""
    return {path: value for path, value in now.items() if value != main.get(path) or filled.get(path) == value}
