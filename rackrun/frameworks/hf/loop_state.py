"""What the Trainer's loop keeps besides weights: counters, sums of losses, flags, the history of logs, callbacks.

It changes in the loop's body, between two steps, where rackrun keeps nothing. So each step takes it as it was when the
step began, and keeps it together with what the step itself has computed (`LoopRecord`). A process that
takes a rank over gets both, and runs the rest of the body of the last committed step from there.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch
from transformers.trainer_callback import ExportableState

from rackrun.errors import UsageError

__all__ = ["LoopRecord", "captured", "fresh_logs", "restore"]

_OF_THE_PROCESS = ("is_local_process_zero", "is_world_process_zero")
"""Fields of `TrainerState` that differ between ranks."""
_OF_THE_RUN = ("best_model_checkpoint",)
"""Fields of `TrainerState` that hold a path of this run."""
_TIMES = ("_runtime", "_per_second")
"""Endings of the names of logged values that are times, or follow from times."""


class LoopRecord:
    """The loop's state at the last committed step or phase; a tracked object, the same on all ranks."""

    def __init__(self) -> None:
        self.step = -1
        """The Trainer's number of the last committed step; -1 before the first."""
        self.first = 0
        """The Trainer's number of rackrun's step 0."""
        self.entered = ""
        """What `captured` returned when that step began."""
        self.logs = 0
        """The number of entries of ``log_history`` when it began."""
        self.results = ""
        """What the step has computed, as JSON (`rackrun.frameworks.hf.step_unit`)."""
        self.phases: list[tuple[str, int, list[str]]] = []
        """What `captured` returned at the end of each phase that has followed the step, or comes before the first, the
        number of entries of ``log_history`` then, and the attributes of the script's own, of each rank or of all."""
        self.history: list[str] = []
        """The entries of ``log_history``, each as JSON, as rank 0 has them."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything, as plain values."""
        return {
            "step": self.step,
            "first": self.first,
            "entered": self.entered,
            "logs": self.logs,
            "results": self.results,
            "phases": json.dumps(self.phases),
            "history": "\n".join(self.history),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set everything from a `state_dict`."""
        self.step, self.first, self.logs = int(state["step"]), int(state["first"]), int(state["logs"])
        self.entered, self.results = str(state["entered"]), str(state["results"])
        self.phases = [(text, logs, own) for text, logs, own in json.loads(state["phases"])]
        self.history = str(state["history"]).split("\n") if state["history"] else []

    def comparable_state(self) -> dict[str, Any]:
        """Return what two runs of the same training have in common: everything but times and paths."""
        return {
            **self.state_dict(),
            "entered": _without_paths(self.entered),
            "phases": [[_without_paths(text), logs, own] for text, logs, own in self.phases],
            "history": [_without_times(json.loads(line)) for line in self.history],
        }

    def step_done(self, step: int, entered: str, fresh: str, results: str) -> None:
        """Keep a step: its number, the loop's state when it began, the logs that had come since, and its results."""
        self.step, self.entered, self.results, self.phases = step, entered, results, []
        self.add_logs(fresh)
        self.logs = len(self.history)

    def phase_done(self, left: str, fresh: str, own: list[str]) -> None:
        """Keep the loop's state at the end of a phase, the logs that have come since the last phase or step, and the
        script's ``own`` attributes (`rackrun.frameworks.own_attributes`), of each rank, or once if all are alike."""
        self.add_logs(fresh)
        self.phases = [*self.phases, (left, len(self.history), own)]

    def add_logs(self, fresh: str) -> None:
        """Add what `fresh_logs` has returned."""
        self.history = [*self.history, *filter(None, fresh.split("\n"))]


def fresh_logs(trainer: Any, known: int) -> str:
    """Return the entries of ``log_history`` after the first ``known``, one line of JSON each."""
    return "\n".join(json.dumps(entry, default=_shown) for entry in trainer.state.log_history[known:])


def captured(trainer: Any) -> str:
    """Return what the loop keeps, without ``log_history``, as JSON: the same on every rank."""
    state = {
        field.name: getattr(trainer.state, field.name)
        for field in dataclasses.fields(trainer.state)
        if field.name not in (*_OF_THE_PROCESS, "log_history")
    }
    found = {
        "state": state,
        "control": vars(trainer.control),
        "callbacks": [_of_callback(callback) for callback in trainer.callback_handler.callbacks],
        "losses": trainer._tr_loss.reshape(-1).tolist(),
        "total_loss": trainer._total_loss_scalar,
        "last_logged": trainer._globalstep_last_logged,
        "flos": trainer._rackrun_flos,
    }
    return json.dumps(found, default=_plain, sort_keys=True)


def restore(trainer: Any, text: str, history: list[str] | None) -> None:
    """Set what `captured` has returned as ``text``. ``history``: the lines of ``log_history``; None leaves it."""
    found = json.loads(text)
    for name, value in found["state"].items():
        setattr(trainer.state, name, value)
    if history is not None:
        trainer.state.log_history = [json.loads(line) for line in history]
    vars(trainer.control).update(found["control"])
    for callback, kept in zip(trainer.callback_handler.callbacks, found["callbacks"], strict=False):
        _set_callback(callback, kept)
    trainer._tr_loss = torch.tensor(found["losses"], dtype=torch.float32, device=trainer.args.device)
    trainer._total_loss_scalar = found["total_loss"]
    trainer._globalstep_last_logged = found["last_logged"]
    trainer._rackrun_flos = found["flos"]


def _without_paths(text: str) -> Any:
    found = json.loads(text) if text else {}
    for name in _OF_THE_RUN:
        found.get("state", {}).pop(name, None)
    return found


def _without_times(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if not name.endswith(_TIMES)}


def _of_callback(callback: Any) -> Any:
    """Return what a callback keeps: its ``state_dict``, or the attributes that transformers would save of it. Raises
    `UsageError` for what is not plain."""
    if callable(getattr(callback, "state_dict", None)) and callable(getattr(callback, "load_state_dict", None)):
        kept = {"state_dict": callback.state_dict()}
    elif isinstance(callback, ExportableState):
        kept = {"attributes": callback.state().get("attributes", {})}
    else:
        return None
    _check_plain(callback, kept)
    return kept


def _set_callback(callback: Any, kept: Any) -> None:
    if kept is None:
        return
    if "state_dict" in kept:
        callback.load_state_dict(kept["state_dict"])
        return
    for name, value in kept["attributes"].items():
        setattr(callback, name, value)


def _check_plain(callback: Any, kept: Any) -> None:
    """Raise `UsageError` if JSON would give back something else than what ``callback`` keeps."""
    if isinstance(kept, dict):
        wrong = next((key for key in kept if not isinstance(key, str)), None)
        if wrong is None:
            for value in kept.values():
                _check_plain(callback, value)
            return
        what = f"the key {wrong!r}"
    elif isinstance(kept, (list, tuple)):
        for value in kept:
            _check_plain(callback, value)
        return
    elif kept is None or isinstance(kept, (bool, int, float, str)) or _is_scalar(kept):
        return
    else:
        what = f"a {type(kept).__name__}"
    raise UsageError(
        f"{type(callback).__name__} keeps {what} in its state, which a process that takes a rank over could not be given.",
        remedy="return numbers, texts, lists, and dictionaries with texts as keys from its state_dict() or state().",
    )


def _is_scalar(value: Any) -> bool:
    """Whether it is one number of numpy's or torch's."""
    return callable(getattr(value, "item", None)) and getattr(value, "ndim", None) == 0


def _plain(value: Any) -> Any:
    """Return a number of numpy's or torch's as Python's. Raises TypeError for anything else."""
    if _is_scalar(value):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not plain")


def _shown(value: Any) -> Any:
    """Return a value of a log as JSON can have it: as text where it is no number."""
    return value.item() if _is_scalar(value) else str(value)
