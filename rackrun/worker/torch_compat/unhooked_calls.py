"""Observes calls of a script for which torch has no hook (torch 2.10 to 2.13).

These are `backward`, reading from a `DataLoader`, and calls that change a scheduler, a scaler or an average. Each is
reported to one listener, which belongs to the current run; without a listener they are torch's own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from rackrun.worker.torch_compat import zero_grad

__all__ = ["CallObserver", "install", "leaves", "listen", "mark_weighted", "unobserved"]

_MARK = "rackrun.weighted"


class CallObserver(Protocol):
    """Receives the observed calls."""

    def backward(self, roots: Sequence[torch.Tensor]) -> Callable[[], None] | None:
        """Called when `backward` begins on ``roots`` into all leaves. A returned function is called when it is over."""
        ...

    def record_batch_read(self, begun_in: Any) -> None:
        """Called when a batch is read from a DataLoader. ``begun_in``: the value of `attempt` when its iteration
        began."""
        ...

    def record_change(self, thing: Any, call: str) -> None:
        """Called when ``call`` is about to change ``thing``: a scheduler, a scaler or an average."""
        ...

    @property
    def attempt(self) -> Any: ...


_listener: CallObserver | None = None
_inside = False
"""Whether an observed change is in progress: a scheduler steps others that are part of it."""


def listen(listener: CallObserver | None) -> None:
    """Set the listener; None removes it."""
    global _listener  # noqa: PLW0603 - of the process, as torch's functions are
    _listener = listener


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Context manager in which calls are not reported: rackrun reads the script's data on its behalf."""
    global _listener  # noqa: PLW0603 - of the process, as torch's functions are
    listener, _listener = _listener, None
    try:
        yield
    finally:
        _listener = listener


def install() -> None:
    """Patch torch's functions, once per process."""
    if getattr(torch.autograd.backward, "_rackrun_tells", False):
        return
    _tell_of_backward()
    _tell_of_batches()
    for kind in vars(lr_scheduler).values():
        if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler) and "step" in vars(kind):
            _tell_of_changes(kind, "step")
    _tell_of_changes(torch.amp.GradScaler, "update")
    _tell_of_changes(AveragedModel, "update_parameters")


def mark_weighted(loss: torch.Tensor) -> None:
    """Mark ``loss`` as weighted: `leaves` does not look beyond it."""
    if loss.grad_fn is not None:
        loss.grad_fn.metadata[_MARK] = True  # type: ignore[index]


def leaves(roots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the leaves that a backward pass from ``roots`` reaches without passing through a marked tensor."""
    waiting: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    found = [root for root in roots if root.grad_fn is None and root.requires_grad]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node in seen or _MARK in node.metadata:
            continue
        seen.add(node)  # kept in the set, so that its id is not reused
        if hasattr(node, "variable"):
            found.append(node.variable)
        waiting += [following for following, _ in node.next_functions if following is not None]
    return found


def _tell_of_backward() -> None:
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        roots = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        given = (grad_tensors,) if isinstance(grad_tensors, torch.Tensor) else tuple(grad_tensors or ())
        whole = kwargs.get("inputs") is None and all(one is None for one in given)
        zero_grad.backward_begins()
        after = _listener.backward(roots) if _listener is not None and whole else None
        original(tensors, grad_tensors, *args, **kwargs)
        if after is not None:
            after()

    backward._rackrun_tells = True  # type: ignore[attr-defined]
    torch.autograd.backward = backward


def _tell_of_batches() -> None:
    begin, read = DataLoader.__iter__, _BaseDataLoaderIter.__next__

    def began(self: Any) -> Iterator[Any]:
        iteration = begin(self)
        iteration._rackrun_begun_in = _listener.attempt if _listener is not None else None  # type: ignore[attr-defined]
        return iteration

    def given(self: Any) -> Any:
        if _listener is not None and not hasattr(self._dataset, "rackrun_delivers"):
            _listener.record_batch_read(getattr(self, "_rackrun_begun_in", None))
        return read(self)

    DataLoader.__iter__ = began  # type: ignore[method-assign, assignment]
    _BaseDataLoaderIter.__next__ = given  # type: ignore[method-assign]


def _tell_of_changes(kind: Any, call: str) -> None:
    original = getattr(kind, call)

    @functools.wraps(original)
    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _inside  # noqa: PLW0603 - of the main thread
        outermost, _inside = not _inside, True
        try:
            # a schedule that receives the step's number depends on nothing else
            of_step = isinstance(self, lr_scheduler.LRScheduler) and not isinstance(
                self, lr_scheduler.ReduceLROnPlateau
            )
            if outermost and _listener is not None and not (of_step and (args or kwargs)):
                _listener.record_change(self, call)
            return original(self, *args, **kwargs)
        finally:
            if outermost:
                _inside = False

    setattr(kind, call, told)
