"""``run.log`` takes anything, and what it sends is read by everybody."""

from __future__ import annotations

import enum
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rackrun.coordinator.observe.step_log import step_line
from rackrun.protocol.ids import Generation, Incarnation, Position, Rank, SlotId
from rackrun.protocol.wire import Logged, decode_upward, encode
from rackrun.worker.process.log_values import log_values


class Mute:
    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__


class Two(enum.IntEnum):
    TWO = 2


class Text(str):
    __slots__ = ()


def sent(values: dict[str, Any]) -> dict[str, float | int | str]:
    """What comes out at the coordinator; and it is one line for a person."""
    message = Logged(
        slot=SlotId("t/0"),
        incarnation=Incarnation(1),
        generation=Generation(1),
        rank=Rank(0),
        at=Position(3),
        values=log_values(values),
    )
    received = decode_upward(encode(message))
    assert isinstance(received, Logged)
    line = step_line(received)
    line.encode()
    assert line.isprintable()
    msgspec.json.encode(received)
    return received.values


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1), (True, 1), (-0.5, -0.5), ("text", "text"), (Two.TWO, 2), (Text("t"), "t"), (2**63 - 1, 2**63 - 1),
        (2**70, float(2**70)), (-(2**64), -float(2**64)), (np.int64(7), 7), (np.uint64(2**64 - 1), float(2**64)), (np.float32(0.5), 0.5),
        (np.float64(0.25), 0.25), (np.bool_(True), 1.0), (np.str_("s"), "s"), (np.array(3.0), 3.0), (torch.tensor(2.5), 2.5),
        (torch.tensor(2), 2), (torch.tensor([4.0], requires_grad=True), 4.0), (Decimal("1.5"), 1.5), (Fraction(1, 4), 0.25),
        (float("inf"), math.inf), (None, "None"), ("\ud800", "\\ud800"), (b"\xff", "b'\\xff'"), ([1, {2: 3}], "[1, {2: 3}]"), (Mute(), "<Mute>"),
        (1 + 2j, "(1+2j)"),
    ],
)  # fmt: skip
def test_what_becomes_of_a_value(value: Any, expected: float | str) -> None:
    assert sent({"value": value}) == {"value": expected}
    assert type(sent({"value": value})["value"]) is type(expected)


def test_nan_stays_nan() -> None:
    assert math.isnan(sent({"loss": float("nan")})["loss"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value",
    [10**400, 10**10_000, torch.ones(3), np.ones((2, 2)), "x" * 100_000, object(), type, torch.ones(2, device="meta")],
    ids=lambda v: type(v).__name__,
)
def test_what_is_no_number_becomes_a_short_text(value: object) -> None:
    (text,) = sent({"v": value}).values()
    assert isinstance(text, str)
    assert len(text) < 1_200


def test_names_may_be_anything_too() -> None:
    assert list(sent({"\ud800": 1, "a\nb": 2, "n" * 500: 3}))[0] == "\\ud800"  # noqa: RUF015


ANYTHING = st.recursive(
    st.one_of(
        st.none(),
        st.integers(),
        st.floats(),
        st.text(),
        st.binary(),
        st.complex_numbers(),
        st.booleans(),
        st.builds(Mute),
        st.dates(),
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.integers(), inner, max_size=3)
        | st.sets(st.integers(), max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=150)
@given(st.dictionaries(st.text(st.characters(), max_size=5), ANYTHING, max_size=4))
def test_whatever_is_logged_arrives(values: dict[str, Any]) -> None:
    assert len(sent(values)) <= len(values)
