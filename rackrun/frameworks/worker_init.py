"""Refuses a loader whose processes the script prepares: rackrun also reads samples outside of them."""

from __future__ import annotations

import functools
from typing import Any

from rackrun.errors import UsageError

__all__ = ["refuse_worker_init"]

_STOCK = {"accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "transformers"}
"""Packages whose functions only seed a process. rackrun seeds each sample."""


def refuse_worker_init(loader: Any) -> None:
    """Raise `UsageError` for a ``worker_init_fn`` of the script's own. A step that is done again reads its samples in
    the worker itself, where that function was not called."""
    function = getattr(loader, "worker_init_fn", None)
    while isinstance(function, functools.partial):
        function = function.func
    if function is not None and getattr(function, "__module__", "").partition(".")[0] not in _STOCK:
        raise UsageError(
            f"the training loader has a worker_init_fn ({getattr(function, '__qualname__', type(function).__name__)}), but a step that "
            "is done again reads its samples in the training process, where it is not called.",
            remedy="prepare what the data set needs in its __getitem__, the first time that it is called in a process.",
        )
