"""``rackrun --framework titan``: makes every Trainer of torchtitan elastic as it is made."""

from __future__ import annotations

import functools
from typing import Any

import torchtitan.trainer

from rackrun.frameworks.titan.elastic_trainer import Elastic

__all__ = ["install"]


def install() -> None:
    """Let each Trainer that is made be of a class with `Elastic` before its own, also where that is a subclass."""

    def new(cls: Any, *_: Any, **__: Any) -> Any:
        return object.__new__(cls if issubclass(cls, Elastic) else _elastic(cls))

    torchtitan.trainer.Trainer.__new__ = new


@functools.cache
def _elastic(cls: Any) -> Any:
    return type(cls.__name__, (Elastic, cls), {"__module__": cls.__module__})
