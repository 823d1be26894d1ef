"""Reports accesses to ``.data`` of parameters (torch 2.10 to 2.15): a write through it moves no version counter.

torch has no hook for this. Its parameters are of two Python classes, and each is given a property that does what
``torch.Tensor.data`` does, which itself is left alone. Dynamo does not call the property: it has its own meaning of
``.data``, so compiled functions are neither changed nor reported.
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
_kept: dict[int, _Data] = {}
"""By ``id``: what was read as ``data`` and exists still, also as the base of a view."""


class _Data(weakref.ref[torch.Tensor]):
    __slots__ = ("key", "of")
    key: int
    of: int
    """``id`` of the parameter."""


def kept() -> set[int]:
    """Return the ``id`` of each parameter whose ``data`` was read and exists still: it may be written through that at
    any time."""
    return {data.of for data in tuple(_kept.values())} if _kept else set()


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
        data = _Data(value, _dropped)
        data.key, data.of = id(value), id(self)
        _kept[data.key] = data
        return value

    def put(self: torch.Tensor, value: torch.Tensor) -> None:
        if _watcher is not None:
            _watcher(self)
        write(self, value)

    return property(not_traced(get), not_traced(put), doc=own.__doc__)


@not_traced
def _dropped(data: Any) -> None:
    known = _kept.pop(data.key, None)
    if known is not None and known is not data:
        _kept[known.key] = known


@contextlib.contextmanager
def outside_of_modes() -> Iterator[bool]:
    """Compute as outside of everything that a script may have entered where it accesses a parameter: autograd, inference
    mode, a dispatch mode, a transformation of ``torch.func``. Yields whether it may compute at all: not while a CUDA
    graph is captured, which would repeat it."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
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
