"""Encoding of messages as msgpack with a type tag, for coordinator and agent and for agent and worker alike.

Nothing is ever unpickled. `PROTOCOL` is compared when an agent connects; an agent with another version is refused, with
both versions named.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from rackrun.protocol.commands import WorkerCommand
from rackrun.protocol.encodable import encodable
from rackrun.protocol.events import StopRequested, TrayEvent, WorkerEvent
from rackrun.protocol.ids import Generation, Incarnation, Position, Rank, SlotId

__all__ = [
    "PROTOCOL",
    "AgentEvent",
    "FillerState",
    "Logged",
    "StateCopied",
    "Telemetry",
    "UnitCommitted",
    "UnitSealed",
    "Upward",
    "decode_command",
    "decode_upward",
    "encode",
]

PROTOCOL = 2
"""Version of the messages."""


class _Telemetry(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="event"):
    slot: SlotId
    incarnation: Incarnation
    generation: Generation
    rank: Rank
    at: Position


class UnitCommitted(_Telemetry, frozen=True, kw_only=True):
    """This rank saw the gate of a step or phase pass. For the ledger, the status line and the report; not for the
    core."""

    attempt: int = 0
    rescaled: int = 0
    """The part of ``attempt`` in which nothing broke: a gradient had no scale yet, or had outgrown it
    (``reduction="exact"``)."""
    seconds: float = 0.0
    """Seconds that the committed attempt took on this rank, without the time in which it waited for a plan."""
    own: float = 0.0
    """The part of ``seconds`` in which this rank did not wait for others; 0: not known."""
    passes: int = 0
    """Number of micro-batches that this rank computed in the committed attempt, ghosts included."""
    in_passes: float = 0.0
    """The part of ``own`` that the micro-batches took. The rest does not depend on their number."""
    meets: bool = False
    """Whether ranks with different samples took part in a collective in a micro-batch before the last
    (`rackrun.worker.batch.microbatch_collectives`)."""
    gate: tuple[float, ...] = ()
    ids: bytes = b""
    """Sample ids that the loader delivered in the committed attempt: int64, little endian, in order of delivery."""
    stages: dict[str, float] = {}
    """Milliseconds until each stage of the recovery before this unit (`rackrun.worker.membership.recovery_stages`)."""


class UnitSealed(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="event"):
    """A unit of a worker that died in or after its gate without reporting a commit.

    The agent reads it from the worker's heartbeat page. The unit counts if the next plan says that it is committed.
    """

    slot: SlotId
    incarnation: Incarnation
    generation: Generation
    at: Position
    ids: bytes = b""


class StateCopied(_Telemetry, frozen=True, kw_only=True):
    """A copy of this rank's state after step ``at`` was made, was used, or failed. For the metrics; not for the
    core."""

    kind: str
    """``snapshot``; ``copy`` (of a snapshot, on another tray); ``checkpoint`` (on disk); ``resume`` (from a
    checkpoint)."""
    outcome: str = "done"
    """``done`` or ``failed``; for a checkpoint also ``passed_over`` (an older one was being written) or ``not_used``
    (by a resumption)."""
    bytes: int = 0
    """Size of this rank's part, in bytes."""
    seconds: float = 0.0
    """For a snapshot: the training time that it took; otherwise its duration from begin to end."""


class FillerState(msgspec.Struct, frozen=True, kw_only=True, tag="FillerTold", tag_field="event"):
    """A filler has started, still runs, or has ended with all processes that it started. For the metrics and the
    report; not for the core."""

    slot: SlotId
    incarnation: Incarnation
    """Incarnation of the spare beside which the filler runs."""
    start: int
    """Number of this start in the slot, from 1. The count begins anew when the agent is started again."""
    state: str
    """``running``, ``ended``, or ``given up`` (ended, and not started there again)."""
    seconds: float
    """Seconds since the filler's start."""
    cpu_s: float
    """Processor time of all its processes, in seconds."""
    because: str = ""
    """Why the filler ended."""
    gone_s: float | None = None
    """Seconds from the moment it had to end until none of its processes was left; None: it ended by itself."""


class Logged(_Telemetry, frozen=True, kw_only=True):
    """Values of ``run.log(...)``. The launcher prints one line per step, in order, whichever rank sends first."""

    values: dict[str, float | int | str]


Telemetry: TypeAlias = UnitCommitted | UnitSealed | StateCopied | FillerState | Logged
AgentEvent: TypeAlias = WorkerEvent | TrayEvent | StopRequested
"""Every event that an agent may send. Any other is the coordinator's own; `StopRequested` is from an agent that was
started by hand."""
Upward: TypeAlias = AgentEvent | Telemetry
"""Every message that travels from worker to agent to coordinator."""

_encoder = msgspec.msgpack.Encoder()
_upward: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Upward)
_command: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(WorkerCommand)


def encode(message: Upward | WorkerCommand) -> bytes:
    """Return ``message`` as msgpack, whatever text and numbers it holds.

    Values that cannot be sent unchanged are replaced by the closest values that can (`rackrun.protocol.encodable`).
    """
    try:
        return _encoder.encode(message)
    except (ValueError, OverflowError, TypeError):  # UnicodeEncodeError is a ValueError
        return _encoder.encode(encodable(message))


def decode_upward(data: bytes) -> Upward:
    """Decode a message to the coordinator. Raises `msgspec.MsgspecError`, and no other error, on invalid data."""
    message: Upward = _decode(_upward, data)
    return message


def decode_command(data: bytes) -> WorkerCommand:
    """Decode a command to a worker. Raises `msgspec.MsgspecError`, and no other error, on invalid data."""
    message: WorkerCommand = _decode(_command, data)
    return message


def _decode(decoder: msgspec.msgpack.Decoder[Any], data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except (ValueError, OverflowError, RecursionError, MemoryError, TypeError) as error:
        if isinstance(error, msgspec.MsgspecError):
            raise
        raise msgspec.DecodeError(f"no message ({type(error).__name__}: {error})") from error
