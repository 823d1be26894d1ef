"""What an optimizer holds: tensors and plain values for its parameters, and the options of its groups.

A parameter's path is ``state/GROUP/INDEX``, by its place in the optimizer's groups. One that the script has taken out
of all groups may still have state, which torch goes on with when a later step adds the parameter again. Its path is
``state/outside/INDEX``, by its place among all tracked parameters. ``outside``, in the functions below, is what
`OptimizerGroups.outside` has found, with these places.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from operator import methodcaller
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from rackrun.checkpoint.image.plain_values import SCALARS, flatten, leaves, without_tensors
from rackrun.errors import StepError
from rackrun.worker.tensors.tensor_lists import same_objects

__all__ = [
    "OUTSIDE",
    "HeldObjects",
    "Outside",
    "held_objects",
    "held_tensors",
    "key_order",
    "optimizer_state",
    "plain_groups",
    "plain_state",
    "put_held_objects",
    "put_in_order",
]

_VALUES = methodcaller("values")
OUTSIDE = "outside"
"""Stands in paths in place of a group's index."""
Outside: TypeAlias = Sequence[tuple[int, torch.Tensor]]
"""Parameters in no group for which an optimizer has state, each after its place among all tracked parameters."""


class HeldObjects(NamedTuple):
    """What an optimizer held for its parameters at a moment: the objects themselves, not copies of tensors.

    The items of all dictionaries are in two lists. A copy of each dictionary, in every step, would cost the garbage
    collector ten times what it costs to make.
    """

    parameters: list[Any]
    held: list[Any]
    """What it held for each of them: a dictionary, usually."""
    lengths: list[int]
    """The number of items of each dictionary."""
    keys: list[Any]
    """The keys of all dictionaries, one after another."""
    values: list[Any]
    """The values for ``keys``."""

    @property
    def are_dictionaries(self) -> bool:
        """Whether it held dictionaries alone, subclasses among them, so that ``values`` is everything."""
        return len(self.lengths) == len(self.held)


def optimizer_state(
    optimizer: torch.optim.Optimizer, outside: Outside = ()
) -> Iterator[tuple[str, torch.Tensor, str, Any]]:
    """Yield path of the parameter, parameter, key, and value of all that the optimizer holds.

    The tensors in a list (as LBFGS has) come first, each with the key ``key/0`` and so on, and then the list itself.
    """
    for group_index, members in _members(optimizer, outside):
        for index, parameter in members:
            held = optimizer.state.get(parameter)
            if not held:
                continue
            path = f"state/{group_index}/{index}"
            for key in sorted(held):
                value = held[key]
                if not isinstance(value, torch.Tensor):
                    for inner, tensor in flatten(key, value).items():
                        yield path, parameter, inner, tensor
                yield path, parameter, key, value


def held_tensors(name: str, optimizer: torch.optim.Optimizer, outside: Outside = ()) -> dict[str, torch.Tensor]:
    """Return path -> tensor for all that the optimizer holds for parameters, in lists too."""
    found: dict[str, torch.Tensor] = {}
    for group_index, members in _members(optimizer, outside):
        for index, parameter in members:
            of: dict[str, Any] = optimizer.state.get(parameter) or {}
            for key in sorted(of):
                path = f"{name}/state/{group_index}/{index}/{key}"
                if isinstance(of[key], torch.Tensor):
                    found[path] = of[key]
                elif type(of[key]) not in SCALARS:
                    found.update(leaves(path, of[key]))
    return found


def key_order(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return the keys, in their order, of what the optimizer holds for the parameter with the most."""
    orders = {tuple(held) for held in optimizer.state.values() if isinstance(held, dict)}
    told = [order for order in orders if all(isinstance(key, str) for key in order)]
    return max(sorted(told), key=len, default=())


def put_in_order(optimizer: torch.optim.Optimizer, order: tuple[str, ...]) -> None:
    """Reorder the keys of what the optimizer holds for each parameter."""
    place = {key: number for number, key in enumerate(order)}
    for held in optimizer.state.values() if order else ():
        if not isinstance(held, dict):
            continue
        keys = sorted(held, key=lambda key: place.get(key, len(place)))
        if keys != list(held):
            values = {key: held[key] for key in keys}
            held.clear()
            held.update(values)


def held_objects(optimizer: torch.optim.Optimizer) -> HeldObjects:
    """Return what the optimizer holds for each parameter, in as many calls for any number of parameters."""
    parameters, held = list(optimizer.state), list(optimizer.state.values())
    dictionaries = _dictionaries(held)
    keys = list(chain.from_iterable(dictionaries))
    values = list(chain.from_iterable(map(_VALUES, dictionaries)))  # the collector gives them in another order at times
    return HeldObjects(parameters, held, list(map(len, dictionaries)), keys, values)


def put_held_objects(optimizer: torch.optim.Optimizer, objects: HeldObjects) -> None:
    """Have the optimizer hold again, in the same order, what it held when `held_objects` returned ``objects``. What was
    written into tensors since stays."""
    optimizer.state.clear()
    optimizer.state.update(zip(objects.parameters, objects.held, strict=True))
    items = zip(objects.keys, objects.values, strict=True)
    for one, length in zip(_dictionaries(objects.held), objects.lengths, strict=True):
        then = dict(islice(items, length))
        if list(one) != list(then) or not same_objects(list(one.values()), list(then.values())):
            one.clear()
            one.update(then)  # a mapping: a Counter, for one, would count pairs


def plain_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the options of each parameter group, except tensors and parameters."""
    found = []
    for group in optimizer.param_groups:
        options = {}
        for key, value in group.items():
            if key != "params" and not isinstance(value, torch.Tensor):
                options[key] = value  # noqa: PERF403 - a comprehension is a call of its own, and there may be a group for each parameter
        found.append(options)
    return found


def plain_state(
    name: str, optimizer: torch.optim.Optimizer, outside: Outside = (), objects: HeldObjects | None = None
) -> dict[str, Any]:
    """Return what an optimizer holds for its parameters, except tensors. Usually that is nothing, so all values are
    checked at once first. ``objects``: what `held_objects` has just returned.

    Raises `StepError` for what it holds under other keys than tensors, as ``state["step"]``: no path names it, so that
    a process that takes a rank over would go on without it.
    """
    _refuse_other_keys(name, optimizer)
    inside = _inside(optimizer) if objects is None else objects.values if objects.are_dictionaries else None
    if inside is not None and all(issubclass(kind, torch.Tensor) for kind in set(map(type, inside))):
        return {}
    found: dict[str, Any] = {}
    for group_index, members in _members(optimizer, outside):
        for index, parameter in members:
            of: dict[str, Any] = optimizer.state.get(parameter) or {}
            for key in sorted(of):
                value, path = of[key], f"state/{group_index}/{index}/{key}"
                if type(value) in SCALARS:
                    found[path] = value
                elif not isinstance(value, torch.Tensor):
                    found[path] = without_tensors(f"{name}/{path}", value)
    return found


def _inside(optimizer: torch.optim.Optimizer) -> list[Any] | None:
    """Return all that the optimizer holds in dictionaries, in any order, also keys that are not strings; None where it
    holds something else for a parameter. Takes a fifth of the time of `held_objects`."""
    held = tuple(optimizer.state.values())
    return gc.get_referents(*held) if set(map(type, held)) <= {dict} else None


def _dictionaries(held: list[Any]) -> list[Any]:
    """Return those of ``held`` that are dictionaries, also of a subclass."""
    return held if set(map(type, held)) <= {dict} else [one for one in held if isinstance(one, dict)]


def _refuse_other_keys(name: str, optimizer: torch.optim.Optimizer) -> None:
    """Raise `StepError` for state under a key that is neither in a group nor a parameter: as a text, or a buffer."""
    state = optimizer.state
    if set(map(type, state)) <= {nn.Parameter}:
        return
    trained = set(map(id, chain.from_iterable([group["params"] for group in optimizer.param_groups])))
    if set(map(id, state)) <= trained:
        return
    other = [
        key
        for key, held in state.items()
        if id(key) not in trained and not isinstance(key, nn.Parameter) and not (isinstance(held, dict) and not held)
    ]
    if other:
        told = [f"a tensor (shape {tuple(key.shape)})" if isinstance(key, torch.Tensor) else repr(key) for key in other]
        raise StepError(
            f"{name!r}, a {type(optimizer).__name__}, holds state under {', '.join(told[:3])}, and not for a "
            "parameter: a process that takes a rank over would go on without it.",
            remedy="keep it in the options of a group (optimizer.param_groups[0][...]), or in the state of a parameter.",
        )


def _members(
    optimizer: torch.optim.Optimizer, outside: Outside
) -> list[tuple[int | str, Iterable[tuple[int, torch.Tensor]]]]:
    """Return each group's index, and its parameters with theirs; at the end those outside of all groups."""
    groups = [(index, enumerate(group["params"])) for index, group in enumerate(optimizer.param_groups)]
    return [*groups, (OUTSIDE, outside)] if outside else [*groups]
