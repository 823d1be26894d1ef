"""Messages with any value that their types allow, and bytes that are no message: what a peer may say."""

from __future__ import annotations

import types
import typing
from typing import Any, get_args, get_origin

import msgspec
from hypothesis import strategies as st

from rackrun.protocol import commands, events, wire

__all__ = ["upward", "values_of"]

NUMBERS = st.one_of(
    st.integers(-3, 5), st.integers(-(2**63), 2**64 - 1), st.sampled_from([2**31, 2**40, 2**53, 2**63 - 1, 2**63])
)
FLOATS = st.floats() | st.sampled_from([0.0, -1.0, 1e308, float("nan"), float("inf"), float("-inf")])
TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["", "tray-00/0", "tray-00/1", "tray-00", "here:1", "x" * 5000, "\ud800", "a\x00b\n[red]"]),
)
BYTES = st.binary(max_size=24)
_NAMESPACE = {**vars(events), **vars(commands), **vars(wire)}


def values_of(kind: Any) -> st.SearchStrategy[Any]:  # noqa: PLR0911 - one line a kind
    if isinstance(kind, typing.NewType):
        return values_of(kind.__supertype__)
    if kind is Any or kind is object:
        return NUMBERS | TEXTS
    simple = {int: NUMBERS, float: FLOATS, str: TEXTS, bytes: BYTES, bool: st.booleans(), type(None): st.none()}
    if kind in simple:
        return simple[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(values_of, arguments))
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
        return st.tuples(*map(values_of, arguments))
    if origin is dict:
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=3)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _struct(kind)
    return st.sampled_from(list(kind))  # an enum


def _struct(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    types_ = {field.name: field.type for field in msgspec.structs.fields(kind)}
    fields = {}
    for name, of in types_.items():
        drawn = values_of(of)
        if name == "slot":
            drawn = (
                st.sampled_from(["tray-00/0", "tray-00/1", "tray-00/9", "tray-00/x", "tray-00/²", "tray-00/"]) | drawn
            )
        elif name == "tray":
            drawn = st.just("tray-00") | drawn
        elif name in ("incarnation", "generation", "rank"):
            drawn = st.integers(0, 4) | drawn
        fields[name] = drawn
    return st.fixed_dictionaries(fields).map(lambda values: kind(**values))


def upward(*, but: tuple[type, ...] = ()) -> st.SearchStrategy[Any]:
    """Any message that travels upwards, after a way through the wire: what cannot be sent is none."""
    kinds = [kind for kind in get_args(wire.Upward) if kind not in but]
    return st.sampled_from(kinds).flatmap(_struct)
