"""What an agent is told when it starts. The launcher makes it, before it forks the agent."""

from __future__ import annotations

import signal

import msgspec

from rackrun.protocol.ids import TrayId

__all__ = ["JOB_IS_OVER", "AgentConfig", "FillerConfig", "FillerPauses", "LogConfig", "ScriptConfig"]


JOB_IS_OVER = signal.SIGUSR1
"""From the launcher to its agents; one that has only just begun dies of it."""


class ScriptConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker runs, as torchrun understands it."""

    path: str
    """A file; a module with ``module``; an executable with ``no_python``."""
    args: tuple[str, ...] = ()
    module: bool = False
    no_python: bool = False
    preload: tuple[str, ...] = ()
    """Modules that the fork server imports beforehand, besides torch's."""


class LogConfig(msgspec.Struct, frozen=True, kw_only=True):
    """torchrun's ``--log-dir --redirects --tee --local-ranks-filter`` in torchrun's own notation (``3``, ``0:1,1:3``)."""

    directory: str
    redirects: str = "0"
    tee: str = "0"
    local_ranks_filter: str = ""
    prefix: str = ""
    """Of teed lines, with ``${role_name} ${rank} ${local_rank} ${hostname}``; "": as the environment says, or torchrun's."""


class FillerPauses(msgspec.Struct, frozen=True, kw_only=True):
    """Of a filler that ends by itself."""

    first_s: float = 0.5
    """Before it is started again; it doubles each time."""
    most_s: float = 60.0
    forgotten_after_s: float = 60.0
    """A run as long as this makes the next pause the first."""
    at_once_s: float = 1.0
    """A run shorter than this is no run: ten of them in a row, and the slot gets no more."""


class FillerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What runs beside spares while they wait."""

    command: tuple[str, ...] = ()
    """A program and its arguments; (): nothing does."""
    grace_s: float | None = None
    """From SIGTERM to SIGKILL, when the spare is needed. None: 0.2 s, and 0 where workers have GPUs."""
    last_in_line: bool = True
    """For the processors; else it is like any other process, for tests that have something to wait for."""
    pauses: FillerPauses = FillerPauses()
    sample_s: float = 10.0
    """Between two reports of what one that runs has used."""


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True):
    run_id: str
    tray: TrayId
    slots: int
    coordinator: str
    """``http://host:port``."""
    token: str
    advertise: str
    """The host name or address under which other hosts reach this one."""
    script: ScriptConfig
    logs: LogConfig
    env: dict[str, str] = {}
    """Added to the workers' environment: what is the same for all of them (TORCHELASTIC_RUN_ID, OMP_NUM_THREADS, ...)."""
    topology: bytes = b""
    """This tray as a rack file has it: a JSON list of one `rackrun.topology.sources.partial_topology.PartialTopology`; empty: no rack file."""
    simulated: bool = False
    """The tray shares this host with others of the job. Then NVML speaks of it only where it lists GPUs that ``topology`` names."""
    slot_env: tuple[dict[str, str], ...] = ()
    """By slot, what follows from the whole rack (NCCL's variables). What the user has set stays as it is."""
    filler: FillerConfig = FillerConfig()
    nnodes: int = 1
    max_restarts: int = 3
    grace_s: float = 10.0
    """From SIGTERM to SIGKILL, when a job ends."""
    lease_s: float = 15.0
    """When nothing has come from the coordinator for this long, it is asked whether it is there."""
    stall_floor_ms: int = 1_000
    """The shortest time without progress that may be called a stall."""
