"""Every message survives the wire, and its samples are not all defaults."""

from __future__ import annotations

import typing
from types import ModuleType

import msgspec
import pytest

from rackrun.protocol import commands, events
from rackrun.protocol.commands import GenerationPlan, Member, Restore, Worker
from rackrun.protocol.events import CollectiveWait, ScriptFailure, SlowRank
from rackrun.protocol.gpu_health import Evidence, GpuVerdict, Health, Response
from rackrun.protocol.ids import Generation, Incarnation, Position, Rank, SlotId, Step
from rackrun.protocol.policy_types import Decision, Option, Rung
from rackrun.protocol.timers import FenceOver, Timer, timer_named
from rackrun.protocol.wire import decode_command, decode_upward, encode

SAMPLES: dict[object, object] = {
    int: 3,
    float: 0.5,
    bool: True,
    str: "words",
    bytes: b"bytes",
    GpuVerdict: GpuVerdict(
        at_ms=3,
        uuid="GPU-1",
        index=2,
        health=Health.LOST,
        response=Response.FENCE,
        scope="gpu",
        repair="words",
        evidence=(Evidence(at_ms=2, source="nvml", what="words", health=Health.LOST, fabric=True),),
    ),
    Position: Position(4, 1),
    ScriptFailure: ScriptFailure(type="builtins.ValueError", message="no", traceback="Traceback", where="train.py:3"),
    GenerationPlan: GenerationPlan(
        generation=Generation(2),
        world_size=1,
        members=(Member(rank=Rank(0), slot=SlotId("a/0"), incarnation=Incarnation(3), fresh=True),),
        store="a:1",
        committed=Position(4, 1),
        gate=(0.5, 2.0),
        restores=(Restore(rank=Rank(0), sources=(Rank(1),), snapshot="a:2/a/0/1"),),
        rollback=Step(3),
        layout=Generation(0),
        full=1,
    ),
    Decision: Decision(
        rung=Rung.SWAP,
        reason="words",
        targets={Rank(2): SlotId("a/0")},
        figures={"takeover_s": 0.5},
        options=(Option(rung=Rung.STOP, why_not="words"),),
    ),
    SlowRank: SlowRank(rank=Rank(3), slot=SlotId("b/1"), times=1.5, own_ms=40.5, past=1.25, rows=16, window=20),
    CollectiveWait: CollectiveWait(generation=Generation(2), group=7, number=3, called=((7, 3), (2**52, 1))),
    Worker: Worker(SlotId("a/0"), Incarnation(3)),
    Timer: FenceOver(SlotId("a/0"), Incarnation(3)),
}


def sample(hint: object) -> object:
    if hint in SAMPLES:
        return SAMPLES[hint]
    if isinstance(hint, typing.NewType):
        return sample(hint.__supertype__)
    of, arguments = typing.get_origin(hint), [one for one in typing.get_args(hint) if one is not type(None)]
    if of is tuple:
        return (sample(arguments[0]),) * 2 if ... in arguments else tuple(map(sample, arguments))
    if of is dict:
        return {sample(arguments[0]): sample(arguments[1])}
    return sample(arguments[0])


def filled(kind: type[msgspec.Struct]) -> typing.Any:
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


@pytest.mark.parametrize("module", [commands, events], ids=lambda module: module.__name__)
def test_every_message_is_exported(module: ModuleType) -> None:
    union = events.Event if module is events else commands.Command
    assert {kind.__name__ for kind in typing.get_args(union)} <= set(module.__all__)


def test_what_is_no_message_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_upward(msgspec.msgpack.encode({"event": "NoSuchThing"}))


@pytest.mark.parametrize("kind", typing.get_args(Timer), ids=lambda kind: kind.__name__)
def test_a_timer_survives_the_journal_and_is_found_by_its_text(kind: type[msgspec.Struct]) -> None:
    timer = filled(kind)
    assert msgspec.json.decode(msgspec.json.encode(timer), type=Timer) == timer
    assert timer_named(str(timer)) == timer


@pytest.mark.parametrize("name", ["", "x", "gather:soon", "gather", "fence:a/0"])
def test_a_text_that_names_no_timer_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is no timer"):
        timer_named(name)
