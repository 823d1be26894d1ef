"""What Lightning's loops keep besides weights: progress, metrics, flags, and the attributes of the script's objects.

It changes in the loop's body, between two steps, where rackrun keeps nothing. So each step takes it as it was when the
turn began, and keeps it together with what the step itself has changed (`LoopRecord`). A process that takes a rank over
gets both, and runs the rest of the body of the last committed turn from there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from rackrun.frameworks.lightning.base.package import LightningPackage, package_of
from rackrun.frameworks.lightning.base.plain_text import decoded, encoded
from rackrun.frameworks.lightning.state.logged_results import (
    captured_metrics,
    captured_results,
    restore_metrics,
    restore_results,
)
from rackrun.frameworks.rank_texts import without_copies

__all__ = ["LoopRecord", "captured", "restore", "restore_callbacks"]

_OF_PROCESS = {"_last_time_checked", "log_rank_zero_only"}
"""Attributes of callbacks that mean something in their own process only."""


class LoopRecord:
    """The loops' state at the last committed step or phase; a tracked object, the same on all ranks. A list of texts
    has one for each rank, or one for all where they are equal."""

    def __init__(self) -> None:
        self.step = -1
        """The number of the last committed step; -1 before the first."""
        self.turn: list[str] = []
        """What `captured` returned when that step's turn began."""
        self.calls = ""
        """What rank 0 has logged between the turn's beginning and the step."""
        self.outcome: list[str] = []
        """What the step has left on each rank (`rackrun.frameworks.lightning.step_unit`)."""
        self.after = ""
        """What has changed after the optimizer's update, the same on all ranks."""
        self.phases: list[tuple[list[str], str]] = []
        """What `captured` returned at the end of each phase that has followed the step, or comes before the first, and
        what rank 0 has logged in it."""
        self.fixed = ""
        """What is decided once, when the training begins for the first time: versions of loggers, older files."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything, as plain values."""
        return {
            "step": self.step,
            "turn": json.dumps(self.turn),
            "calls": self.calls,
            "outcome": json.dumps(self.outcome),
            "after": self.after,
            "phases": json.dumps(self.phases),
            "fixed": self.fixed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set everything from a `state_dict`."""
        self.step, self.after, self.fixed = int(state["step"]), str(state["after"]), str(state["fixed"])
        self.calls = str(state["calls"])
        self.turn, self.outcome = json.loads(state["turn"]), json.loads(state["outcome"])
        self.phases = [(texts, calls) for texts, calls in json.loads(state["phases"])]

    def step_done(self, step: int, turn: Sequence[str], calls: str, outcome: Sequence[str], after: str) -> None:
        """Keep a step: the state when its turn began, what was logged before it, and what it has left on each rank."""
        self.step, self.calls, self.after, self.phases = step, calls, after, []
        self.turn, self.outcome = without_copies(turn), without_copies(outcome)

    def phase_done(self, left: Sequence[str], calls: str) -> None:
        """Keep the state of all ranks at the end of a phase, and the calls of loggers in it."""
        self.phases = [*self.phases, (without_copies(left), calls)]


def captured(trainer: Any) -> str:
    """Return what the loops keep on this rank, as text. Raises `UsageError` for a callback that keeps other values."""
    package = package_of(trainer)
    fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
    connector, module = trainer._logger_connector, trainer.lightning_module
    found = {
        "progress": [one.state_dict() for one in _progress(trainer)],
        "loops": {
            "_batches_that_stepped": epoch._batches_that_stepped,
            "_skip_next_val": epoch._skip_next_val,
            "max_epochs": fit.max_epochs,
            "_has_run": epoch.val_loop._has_run,
            "_seen_batches_per_dataloader": dict(epoch.val_loop._seen_batches_per_dataloader),
        },
        "stop": trainer.should_stop,
        "stage": trainer.state.stage.value if trainer.state.stage is not None else None,
        "connector": {
            name: getattr(connector, name)
            for name in (
                "_progress_bar_metrics",
                "_logged_metrics",
                "_callback_metrics",
                "_current_fx",
                "_first_loop_iter",
            )
        },
        "fx": module._current_fx_name,
        "results": captured_results(epoch._results),
        "metrics": captured_metrics(module),
        "rows": trainer._rackrun.logs.counts,
        "files": sorted(trainer._rackrun.files.saved),
    }
    texts = {name: encoded(value, "the LightningModule") for name, value in found.items()}
    callbacks = [_of_callback(one, package) for one in trainer.callbacks]
    return json.dumps([texts, callbacks, trainer._rackrun.own.changed()])


def restore(trainer: Any, text: str) -> None:
    """Set what `captured` has returned as ``text``."""
    package, device = package_of(trainer), trainer.strategy.root_device
    texts, callbacks, own = json.loads(text)
    found = {name: decoded(value, device) for name, value in texts.items()}
    epoch, connector, module = trainer.fit_loop.epoch_loop, trainer._logger_connector, trainer.lightning_module
    for one, state in zip(_progress(trainer), found["progress"], strict=True):
        one.load_state_dict(state)
    loops = found["loops"]
    epoch._batches_that_stepped, epoch._skip_next_val = loops["_batches_that_stepped"], loops["_skip_next_val"]
    trainer.fit_loop.max_epochs, epoch.val_loop._has_run = loops["max_epochs"], loops["_has_run"]
    seen = epoch.val_loop._seen_batches_per_dataloader
    seen.clear()
    seen.update(loops["_seen_batches_per_dataloader"])
    trainer.should_stop = found["stop"]
    stage = found["stage"]
    trainer.state.stage = None if stage is None else package.part("trainer.states").RunningStage(stage)
    for name, value in found["connector"].items():
        setattr(connector, name, value)
    module._current_fx_name = found["fx"]
    epoch.val_loop._results.clear()
    epoch.val_loop._results.batch = None
    restore_results(epoch._results, found["results"], trainer, package)
    restore_metrics(module, found["metrics"])
    trainer._rackrun.logs.counts = list(found["rows"])
    trainer._rackrun.files.saved = set(found["files"])
    restore_callbacks(trainer.callbacks, callbacks, device, package)
    trainer._rackrun.own.restore(own)


def restore_callbacks(
    callbacks: Sequence[Any], texts: Sequence[str], device: torch.device, package: LightningPackage
) -> None:
    """Set what callbacks keep, where that differs from what they have."""
    for callback, text in zip(callbacks, texts, strict=True):
        if not _runs_here(callback, package) and _of_callback(callback, package) != text:
            _set_callback(callback, decoded(text, device), package)


def _progress(trainer: Any) -> list[Any]:
    fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
    return [
        fit.epoch_progress,
        epoch.batch_progress,
        epoch.scheduler_progress,
        epoch.automatic_optimization.optim_progress,
        epoch.val_loop.batch_progress,
    ]


def _runs_here(callback: Any, package: LightningPackage) -> bool:
    """Whether it is a clock that has begun to run in this process."""
    return isinstance(callback, package.part("callbacks").Timer) and callback.start_time() is not None


def _of_callback(callback: Any, package: LightningPackage) -> str:
    """Return what a callback keeps as text."""
    return encoded(_state_of_callback(callback, package), type(callback).__name__)


def _state_of_callback(callback: Any, package: LightningPackage) -> Any:
    """Return what a callback keeps: of those whose every attribute counts, all plain ones; of others their
    ``state_dict``."""
    if _counts_wholly(callback, package):
        return {name: value for name, value in vars(callback).items() if name not in _OF_PROCESS and _is_plain(value)}
    base = package.part("callbacks.callback").Callback
    if type(callback).state_dict is base.state_dict:
        return None
    return callback.state_dict()


def _set_callback(callback: Any, state: Any, package: LightningPackage) -> None:
    if state is None:
        return
    if _counts_wholly(callback, package):
        vars(callback).update(state)
    else:
        callback.load_state_dict(state)


def _counts_wholly(callback: Any, package: LightningPackage) -> bool:
    """Whether it is one of Lightning's whose ``state_dict`` leaves out what the next turn depends on."""
    callbacks = package.part("callbacks")
    return isinstance(callback, (callbacks.ModelCheckpoint, callbacks.EarlyStopping))


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(one) for key, one in value.items())
    return value is None or isinstance(value, (bool, int, float, str, torch.Tensor))
