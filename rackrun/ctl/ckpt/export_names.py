"""Conversion of the names of tensors in a checkpoint to those that ``model.load_state_dict`` takes.

An elastic job names its tensors ``NAME/param/PATH`` and ``NAME/buffer/PATH`` for a tracked module, and differently for
state that belongs to no module. Wrappers put a name of their own in front of every path (DDP's ``module.``, and that of
torch.compile), which is removed. A module that holds several models, such as a `torch.nn.ModuleDict`, is exported one
model at a time: ``--module NAME.PART``. A checkpoint in which no name has this form was written by another program, and
keeps its names.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from rackrun.errors import UsageError

__all__ = ["model_names"]

_OF_MODULE = re.compile(r"([^/]+)/(?:param|buffer)/(.+)", re.DOTALL)
_OF_A_RANK = re.compile(r"@\d+\Z", re.ASCII)
_WRAPPERS = ("module.", "_orig_mod.")


def model_names(held: Collection[str], module: str | None = None) -> dict[str, str]:
    """Name in the checkpoint -> name in the set; what is not to be exported is absent.

    Raises UsageError when there are several modules and none is chosen, or not the chosen one, and for parameters of which
    every rank holds a part that is no box of a whole tensor.
    """
    paths = {name: match for name in held if (match := _OF_MODULE.fullmatch(name))}
    if not paths:
        return {name: name for name in held} if module is None else _below(module, {name: name for name in held})
    modules = sorted({match[1] for match in paths.values()})
    if module is None and len(modules) > 1:
        raise UsageError(
            f"there are several tracked modules: {', '.join(modules)}.",
            remedy="choose one with --module, or give --all.",
        )
    chosen, _, part = (module, "", "") if module in modules or module is None else module.partition(".")
    chosen = chosen if chosen is not None else modules[0]
    if chosen not in modules:
        raise UsageError(f"there is no tracked module {chosen!r}.", remedy=f"choose one of {', '.join(modules)}.")
    named = {name: match[2] for name, match in paths.items() if match[1] == chosen}
    if part:
        named = _below(part, _unwrapped(named))
    if parts := [name for name in named if _OF_A_RANK.search(name)]:
        raise UsageError(
            f"{len(parts)} tensors, such as {min(parts)!r}, are the parts of single ranks; only the model can put them together.",
            remedy="resume the job and save its full state dict; or give --all for the parts under their own names.",
        )
    return _unwrapped(named)


def _below(part: str, named: dict[str, str]) -> dict[str, str]:
    """The tensors of a part of it: ``generator`` of a `torch.nn.ModuleDict`, or of a state dict of several models."""
    found = {name: path[len(part) + 1 :] for name, path in named.items() if path.startswith((f"{part}.", f"{part}/"))}
    if not found:
        there = sorted({re.split(r"[./]", path, maxsplit=1)[0] for path in named.values()})
        raise UsageError(
            f"no tensor is of a module {part!r}.", remedy=f"choose one that is there: {', '.join(there[:10])}."
        )
    return _unwrapped(found)


def _unwrapped(named: dict[str, str]) -> dict[str, str]:
    while wrapper := next((w for w in _WRAPPERS if all(path.startswith(w) for path in named.values())), None):
        named = {name: path.removeprefix(wrapper) for name, path in named.items()}
    return named
