"""What a worker is born with: who it is, and the descriptors that join it to its agent."""

from __future__ import annotations

import msgspec

from rackrun.protocol.commands import StartWorker
from rackrun.protocol.ids import Generation, Incarnation, Rank, SlotId

__all__ = ["MEMORY_HEADER", "SNAPSHOT_JOB", "Boot", "current", "first_rank", "install"]

SNAPSHOT_JOB = "snapshots"
"""Of the arenas that snapshots lie in: nameless memory of one worker."""


MEMORY_HEADER = "X-Rackrun-Memory"
"""With a snapshot, its agent says where it lies in its own memory: ``PID/fd/NUMBER`` under /proc, for whoever is on the same host."""


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """The agent sends this to its fork server; the child keeps it (`install`) and runs the user's script.

    The environment in ``env`` is torchrun's (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, ...): set before the script runs.
    """

    slot: SlotId
    incarnation: Incarnation
    spare: bool
    rank: Rank
    local_rank: int
    world_size: int
    generation: Generation
    env: dict[str, str]
    cpus: tuple[int, ...] = ()
    """The cores near its GPU; empty: wherever it is."""
    numa: int | None = None
    """The node that its memory is taken from first."""
    channel_fd: int = -1
    """Stream socket to the agent (`rackrun.link.channel`). Descriptors are set by the child, once it has received them."""
    page_fd: int = -1
    """Heartbeat page (`rackrun.link.heartbeat_page`)."""
    snapshot_fds: tuple[int, int] = (-1, -1)
    """Two memfds, empty at first, that the agent keeps open: snapshots in them outlive this process."""
    advertise: str = ""
    """The address of this host that other hosts are told; "" where nobody said."""
    exchange: str = ""
    """``host:port`` of the exchange (`rackrun.link.exchange`)."""
    restarts: int = 0
    """How often all workers have begun anew."""
    token: str = ""
    """The job's token, for the snapshot service of other trays."""


def first_rank(command: StartWorker) -> Rank:
    """The rank that the worker begins as. A spare is never rank 0, which scripts take for the main process, as long as there is another:
    whoever asked before ``run.steps()`` may not ask again when it takes a place."""
    return Rank(1) if command.spare and command.rank == 0 and command.world_size > 1 else command.rank


_current: Boot | None = None


def install(boot: Boot) -> None:
    global _current  # noqa: PLW0603 - one process is one worker
    _current = boot


def current() -> Boot | None:
    """How this process was started by an agent; None when it was not."""
    return _current
