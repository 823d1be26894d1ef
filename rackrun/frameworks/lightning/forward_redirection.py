"""Calls a method of the module through its wrapper, and leaves nothing behind where the call is left."""

from __future__ import annotations

from typing import Any

__all__ = ["RestoringRedirection"]


class RestoringRedirection:
    """Put around Lightning's redirection: it replaces the module's ``forward`` until the wrapper comes to it.

    A rank may be lost before that, in a collective of DDP. What is done again would take the wrong ``forward`` then.
    """

    def __init__(self, stock: Any) -> None:
        self._stock = stock

    def __call__(self, wrapper: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Make the call."""
        held = vars(module).get("forward")
        try:
            return self._stock(wrapper, module, *args, **kwargs)
        except BaseException:
            vars(module).pop("forward", None)
            if held is not None:
                vars(module)["forward"] = held
            raise
