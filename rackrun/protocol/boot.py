"""`Boot`: identity and inherited descriptors that a worker receives from its agent when it starts."""

from __future__ import annotations

import msgspec

from rackrun.protocol.commands import StartWorker
from rackrun.protocol.ids import Generation, Incarnation, Rank, SlotId

__all__ = ["MEMORY_HEADER", "SNAPSHOT_JOB", "Boot", "current", "first_rank", "install"]

SNAPSHOT_JOB = "snapshots"
"""Job name of the arenas that hold snapshots. They are anonymous memory (memfds) of one worker."""


MEMORY_HEADER = "X-Rackrun-Memory"
"""HTTP header that an agent sends with a snapshot: where the snapshot lies in the agent's memory, as ``PID/fd/NUMBER``
under /proc, for readers on the same host."""


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent sends to its fork server for one worker. The child stores it (`install`) and runs the user's
    script.

    ``env`` holds torchrun's variables (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, ...), which are set before the script
    runs.
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
    """Cores near the worker's GPU, to which it is bound. Empty: no binding."""
    numa: int | None = None
    """NUMA node from which the worker's memory is allocated first. None: no preference."""
    channel_fd: int = -1
    """Stream socket to the agent (`rackrun.link.channel`). The child sets the descriptor fields after it has received
    the descriptors."""
    page_fd: int = -1
    """Descriptor of the heartbeat page (`rackrun.link.heartbeat_page`)."""
    snapshot_fds: tuple[int, int] = (-1, -1)
    """Two memfds for snapshots, empty at first. The agent keeps them open, so snapshots outlive the worker."""
    advertise: str = ""
    """Address of this host that other hosts are given; "": none was given."""
    exchange: str = ""
    """``host:port`` of the exchange (`rackrun.link.exchange`)."""
    restarts: int = 0
    """Number of restarts of the whole world so far."""
    token: str = ""
    """The job's token, with which this worker reads from other trays' snapshot services."""


def first_rank(command: StartWorker) -> Rank:
    """Return the rank that the worker starts with.

    A spare never starts as rank 0 while the world has another rank. Scripts treat rank 0 as the main process, and a
    script that read its rank before ``run.steps()`` may not read it again when the spare takes over a rank.
    """
    return Rank(1) if command.spare and command.rank == 0 and command.world_size > 1 else command.rank


_current: Boot | None = None


def install(boot: Boot) -> None:
    """Store ``boot`` as this process's boot record, for `current`."""
    global _current  # noqa: PLW0603 - one process is one worker
    _current = boot


def current() -> Boot | None:
    """Return how an agent started this process; None if no agent did."""
    return _current
