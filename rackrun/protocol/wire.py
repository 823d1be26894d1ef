"""Messages as bytes: msgpack with a type tag, the same between coordinator and agent and between agent and worker.

Nothing is ever unpickled. `PROTOCOL` is compared when an agent connects; another version is refused with both named.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from rackrun.protocol.commands import WorkerCommand
from rackrun.protocol.encodable import encodable
from rackrun.protocol.events import Event
from rackrun.protocol.ids import Generation, Incarnation, Position, Rank, SlotId

__all__ = [
    "PROTOCOL",
    "FillerTold",
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


class _Telemetry(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="event"):
    slot: SlotId
    incarnation: Incarnation
    generation: Generation
    rank: Rank
    at: Position


class UnitCommitted(_Telemetry, frozen=True, kw_only=True):
    """This rank saw the gate of a step or phase pass. For the ledger, the status line and the report; not for the core."""

    attempt: int = 0
    seconds: float = 0.0
    """From the unit's first attempt to its gate on this rank."""
    own: float = 0.0
    """Of these, what this rank did not wait for others; 0 when that is not known."""
    passes: int = 0
    """Micro-batches that it computed in the committed attempt, ghosts included."""
    in_passes: float = 0.0
    """Of ``own``, what these took: the rest is the same however many they are."""
    meets: bool = False
    """Ranks with different samples met in a micro-batch before the last (`rackrun.worker.batch.microbatch_collectives`)."""
    gate: tuple[float, ...] = ()
    ids: bytes = b""
    """Sample ids that the loader delivered in the committed attempt: int64, little endian, in order of delivery."""
    stages: dict[str, float] = {}
    """Of the recovery before it: `rackrun.worker.membership.recovery_stages`."""


class UnitSealed(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="event"):
    """The last words of a worker that died in or after a gate and has told of no commit, read from its heartbeat page by its
    agent. The unit counts if the next plan says that it is committed."""

    slot: SlotId
    incarnation: Incarnation
    generation: Generation
    at: Position
    ids: bytes = b""


class StateCopied(_Telemetry, frozen=True, kw_only=True):
    """A copy of this rank's state after step ``at`` was made, used, or could not be. For the metrics; not for the core."""

    kind: str
    """``snapshot``; ``copy`` (of a snapshot, on another tray); ``checkpoint`` (on disk); ``resume`` (from one)."""
    outcome: str = "done"
    """Or ``failed``; of a checkpoint also ``passed_over`` (an older one was being written) and ``not_used`` (by a resumption)."""
    bytes: int = 0
    """Of this rank's part."""
    seconds: float = 0.0
    """Of a snapshot: what it took from training; else from its begin to its end."""


class FillerTold(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="event"):
    """A filler has started, goes on, or is gone with all that it had started. For the metrics and the report; not for the core."""

    slot: SlotId
    incarnation: Incarnation
    """Of the spare beside which it runs."""
    start: int
    """Which one in that slot, from 1; an agent that is started again counts afresh."""
    state: str
    """``running``, ``ended``; ``given up``: ended, and not started there again."""
    seconds: float
    """Since its start."""
    cpu_s: float
    """Processor time, of all its processes."""
    because: str = ""
    """Why it is gone."""
    gone_s: float | None = None
    """From when it had to go until nobody of it was left; None where it went by itself."""


class Logged(_Telemetry, frozen=True, kw_only=True):
    """``run.log(...)``. The launcher prints one line a step, in order, whoever sends it first."""

    values: dict[str, float | int | str]


Telemetry: TypeAlias = UnitCommitted | UnitSealed | StateCopied | FillerTold | Logged
Upward: TypeAlias = Event | UnitCommitted | UnitSealed | StateCopied | FillerTold | Logged
"""Whatever travels from worker to agent to coordinator."""

_encoder = msgspec.msgpack.Encoder()
_upward: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Upward)
_command: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(WorkerCommand)


def encode(message: Upward | WorkerCommand) -> bytes:
    """Whatever text and numbers are in ``message``: what cannot be sent as it is (`rackrun.protocol.encodable`) is sent as what comes closest."""
    try:
        return _encoder.encode(message)
    except (ValueError, OverflowError, TypeError):  # UnicodeEncodeError is a ValueError
        return _encoder.encode(encodable(message))


def decode_upward(data: bytes) -> Upward:
    """Raises `msgspec.MsgspecError`, and nothing else, on anything else."""
    message: Upward = _decode(_upward, data)
    return message


def decode_command(data: bytes) -> WorkerCommand:
    """Raises `msgspec.MsgspecError`, and nothing else, on anything else."""
    message: WorkerCommand = _decode(_command, data)
    return message


def _decode(decoder: msgspec.msgpack.Decoder[Any], data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except (ValueError, OverflowError, RecursionError, MemoryError, TypeError) as error:
        if isinstance(error, msgspec.MsgspecError):
            raise
        raise msgspec.DecodeError(f"no message ({type(error).__name__}: {error})") from error
