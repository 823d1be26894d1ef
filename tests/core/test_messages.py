"""Every message survives the wire, and its samples are not all defaults."""

from __future__ import annotations

import typing

import msgspec
import pytest

from rackrun.core import commands, events
from rackrun.core.commands import Member, Plan, Restore, Worker
from rackrun.core.events import Failure
from rackrun.core.ids import Generation, Incarnation, Position, Rank, SlotId, Step
from rackrun.core.wire import decode_command, decode_upward, encode

SAMPLES: dict[object, object] = {
    int: 3,
    float: 0.5,
    bool: True,
    str: "words",
    Position: Position(4, 1),
    Failure: Failure(type="builtins.ValueError", message="no", traceback="Traceback", where="train.py:3"),
    Plan: Plan(
        generation=Generation(2),
        world_size=1,
        members=(Member(rank=Rank(0), slot=SlotId("a/0"), incarnation=Incarnation(3), fresh=True),),
        store="a:1",
        committed=Position(4, 1),
        gate=(0.5, 2.0),
        restores=(Restore(rank=Rank(0), sources=(Rank(1),), snapshot="a:2/a/0/1"),),
        rollback=Step(3),
    ),
    Worker: Worker(SlotId("a/0"), Incarnation(3)),
}


def sample(hint: object) -> object:
    if hint in SAMPLES:
        return SAMPLES[hint]
    if isinstance(hint, typing.NewType):
        return sample(hint.__supertype__)
    arguments = [argument for argument in typing.get_args(hint) if argument not in (type(None), ...)]
    value = sample(arguments[0])
    return (value, value) if typing.get_origin(hint) is tuple else value


def filled(kind: type[msgspec.Struct]) -> msgspec.Struct:
    return kind(
        **{name: sample(hint) for name, hint in typing.get_type_hints(kind).items() if name != "__struct_config__"}
    )


@pytest.mark.parametrize("kind", typing.get_args(events.Event), ids=lambda kind: kind.__name__)
def test_an_event_survives_the_wire(kind: type[msgspec.Struct]) -> None:
    event = filled(kind)
    assert decode_upward(encode(event)) == event


@pytest.mark.parametrize("kind", typing.get_args(commands.WorkerCommand), ids=lambda kind: kind.__name__)
def test_a_command_survives_the_wire(kind: type[msgspec.Struct]) -> None:
    command = filled(kind)
    assert decode_command(encode(command)) == command


def test_what_is_no_message_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_upward(msgspec.msgpack.encode({"event": "NoSuchThing"}))
