"""Reports accesses to ``.data`` of parameters (torch 2.10 to 2.15): a write through it moves no version counter.

torch has no hook for this. Its parameters are of two Python classes, and each is given a property that does what
``torch.Tensor.data`` does, which itself is left alone. Dynamo does not call the property, so compiled functions are
neither changed nor reported. A write through ``.data`` in code that AOTAutograd has compiled moves the version.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from rackrun.worker.torch_compat.not_compiled import not_traced

__all__ = ["install", "kept", "outside_of_modes", "watch"]

_watcher: Callable[[torch.Tensor], None] | None = None
_kept: dict[tuple[int, int], _Memory] = {}
"""By the ``id`` of a tensor and of a parameter: tensors that exist still, and have the parameter's memory."""


class _Memory(weakref.ref[torch.Tensor]):
    """A tensor that was read as ``data``, or that ``data`` was replaced by. It exists as long as any view of it."""

    __slots__ = ("key",)
    key: tuple[int, int]


def kept() -> set[int]:
    """Return the ``id`` of each parameter whose memory another tensor has, as far as that was its ``data``: it may be
    written through that at any time."""
    return {of for _, of in tuple(_kept)} if _kept else set()


@not_traced
def _keep(parameter: torch.Tensor, tensor: torch.Tensor) -> None:
    memory = _Memory(tensor, _dropped)
    memory.key = key = id(tensor), id(parameter)
    _kept[key] = memory


@not_traced
def _dropped(memory: Any) -> None:
    key = memory.key
    if _kept.get(key) is memory:
        del _kept[key]


def watch(watcher: Callable[[torch.Tensor], None] | None) -> None:
    """Have ``watcher`` called with a parameter right before its ``data`` is read or replaced, in any thread; None: have
    nothing called."""
    global _watcher  # noqa: PLW0603 - of the process, as the classes are
    _watcher = watcher


def install() -> None:
    """Give `torch.nn.Parameter` and DTensor the property, once per process."""
    for kind in (nn.Parameter, DTensor):
        if "data" not in vars(kind):
            kind.data = _reporting(kind.data)  # type: ignore[assignment]


def _reporting(own: Any) -> property:
    """Return a property that reports, and then does what the descriptor ``own`` does."""
    read, write = own.__get__, own.__set__

    def get(self: torch.Tensor) -> torch.Tensor:
        if _watcher is not None:
            _watcher(self)
        value: torch.Tensor = read(self)
        _keep(self, value)
        return value

    def put(self: torch.Tensor, value: torch.Tensor) -> None:
        if _watcher is not None:
            _watcher(self)
        write(self, value)
        if value is not self:  # it is where module.to(...) has nothing to do
            _keep(self, value if value._base is None else value._base)

    return property(not_traced(get), not_traced(put), doc=own.__doc__)


@contextlib.contextmanager
def outside_of_modes() -> Iterator[bool]:
    """Compute as outside of everything that a script may have entered where it accesses a parameter: autograd, inference
    mode, a dispatch mode, a transformation of ``torch.func``. Yields whether it may compute at all: not while a CUDA
    graph is captured, which would repeat it."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        yield False
        return
    with contextlib.ExitStack() as left:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            left.enter_context(temporarily_clear_interpreter_stack())
        left.enter_context(torch._C.DisableTorchFunction())
        left.enter_context(_disable_current_modes())
        left.enter_context(torch.inference_mode(mode=False))
        left.enter_context(torch.no_grad())
        yield True
