"""`Elastic`, which puts rackrun's steps into torchtitan's Trainer, and `Trainer`, that with torchtitan's.

The loop stays torchtitan's: ``Trainer.train`` asks for the next step in ``should_continue_training``, where a spare
waits, and each ``train_step`` is one unit (`rackrun.frameworks.titan.step_unit`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torchtitan.trainer

from rackrun.errors import UsageError
from rackrun.frameworks.titan.refusals import refuse_class, refuse_config, refuse_hooks, refuse_version
from rackrun.frameworks.titan.training_session import StockMethods, TrainingSession
from rackrun.worker.process.runtime import start

__all__ = ["Elastic", "Trainer"]

start()

_Base: Any = torchtitan.trainer.Trainer if TYPE_CHECKING else object


class Elastic(_Base):  # type: ignore[misc]
    """Put this before torchtitan's ``Trainer`` or a subclass of it: ``class T(rackrun.titan.Elastic, Trainer): ...``.

    Any rank may be lost at any moment; its replacement goes on inside of the same loop, with the same weights, the same
    samples and the same logs.
    """

    _rackrun: TrainingSession | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_class(cls)

    def init_distributed(self) -> Any:
        """Return torchtitan's parallel dimensions, over the process group that exists already. Raises `UsageError` for
        what is not supported."""
        refuse_version()
        refuse_config(self.config)
        # torchtitan does this where it makes the process group
        torch.autograd.set_multithreading_enabled(False)
        return super().init_distributed()

    def train(self) -> None:
        """Train as torchtitan does."""
        if self._rackrun is not None:
            raise UsageError(
                "train() was called again: a process that takes a rank over goes on inside of one loop.",
                remedy="train one Trainer, once, in a script.",
            )
        refuse_hooks(self.optimizers)
        stock = StockMethods(super().train_step, super().forward_backward_step)
        session = self._rackrun = TrainingSession(self, stock)
        # without torch's `record` around it, which would let a spare that is not needed, or is to end, go on behind it
        stock_train = inspect.unwrap(torchtitan.trainer.Trainer.train)
        session.install()
        stock_train(self)
        session.end()

    def should_continue_training(self) -> bool:
        """Come to the next step, and return whether there is one."""
        assert self._rackrun is not None, "train() has begun"
        return self._rackrun.enter()

    def train_step(self, data_iterator: Iterator[Any]) -> None:  # noqa: ARG002 - rackrun brings the data
        """Do one step as a unit."""
        assert self._rackrun is not None, "train() has begun"
        self._rackrun.do_step()

    def forward_backward_step(self, **given: Any) -> Any:
        """Do one micro-batch."""
        assert self._rackrun is not None, "train() has begun"
        return self._rackrun.unit.forward_backward(**given)


class Trainer(Elastic, torchtitan.trainer.Trainer):  # type: ignore[misc]
    """torchtitan's ``Trainer``; see `Elastic`."""

    @dataclass(kw_only=True, slots=True)
    class Config(torchtitan.trainer.Trainer.Config):  # type: ignore[misc]
        """torchtitan's ``Trainer.Config``, which builds an elastic Trainer."""
