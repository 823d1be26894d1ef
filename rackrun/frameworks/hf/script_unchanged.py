"""``rackrun --framework hf``: makes every ``Trainer`` of a script elastic when it begins to train, whatever class of the
script's or of another library it is."""

from __future__ import annotations

import functools
from typing import Any

import transformers

from rackrun.frameworks.hf.elastic_trainer import Elastic

__all__ = ["install"]


def install() -> None:
    """Put `Elastic` before the class of each Trainer whose ``train`` is called."""
    stock = transformers.Trainer.train

    @functools.wraps(stock)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, Elastic):
            cls = type(self)
            self.__class__ = type(cls.__name__, (Elastic, cls), {"__module__": cls.__module__})
        return stock(self, *args, **kwargs)

    transformers.Trainer.train = train
