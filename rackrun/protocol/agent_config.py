"""Configuration that the launcher builds for an agent before it forks the agent."""

from __future__ import annotations

import signal

import msgspec

from rackrun.protocol.ids import TrayId

__all__ = ["JOB_IS_OVER", "AgentConfig", "FillerConfig", "FillerPauses", "LogConfig", "ScriptConfig"]


JOB_IS_OVER = signal.SIGUSR1
"""Signal that the launcher sends to its agents when the job is over. An agent that has not installed its handler yet
dies of it."""


class ScriptConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The user's script or program that a worker runs, with torchrun's meaning of each option."""

    path: str
    """Path of a script file; name of a module if ``module`` is set; an executable if ``no_python`` is set."""
    args: tuple[str, ...] = ()
    module: bool = False
    no_python: bool = False
    preload: tuple[str, ...] = ()
    """Modules that the fork server imports in advance, besides torch's."""
    framework: str = ""
    """A framework whose classes are made elastic before the script runs: ``hf``, ``lightning`` or ``titan``; "": none."""


class LogConfig(msgspec.Struct, frozen=True, kw_only=True):
    """torchrun's ``--log-dir --redirects --tee --local-ranks-filter``, in torchrun's notation (``3``, ``0:1,1:3``)."""

    directory: str
    redirects: str = "0"
    tee: str = "0"
    local_ranks_filter: str = ""
    prefix: str = ""
    """Template for the prefix of teed lines; may contain ``${role_name} ${rank} ${local_rank} ${hostname}``. "": the
    environment's template if set, else torchrun's default."""


class FillerPauses(msgspec.Struct, frozen=True, kw_only=True):
    """Back-off before a filler that exited by itself is started again."""

    first_s: float = 0.5
    """Seconds before the first restart. Each further pause is twice as long, up to ``most_s``."""
    most_s: float = 60.0
    forgotten_after_s: float = 60.0
    """After a run of at least this many seconds the next pause is ``first_s`` again."""
    at_once_s: float = 1.0
    """A run shorter than this many seconds counts as failed. After ten such runs in a row the slot gets no more
    fillers."""


class FillerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The filler: a program that runs beside each spare while the spare waits."""

    command: tuple[str, ...] = ()
    """The program and its arguments; (): no filler."""
    grace_s: float | None = None
    """Seconds from SIGTERM to SIGKILL when the spare is needed. None: 0.2 s, and 0 where workers have GPUs."""
    last_in_line: bool = True
    """Whether the filler runs at the lowest processor priority. Tests that wait for the filler set it to False."""
    pauses: FillerPauses = FillerPauses()
    sample_s: float = 10.0
    """Seconds between two reports of the resources that a running filler has used."""


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that an agent needs to know when it starts."""

    run_id: str
    tray: TrayId
    slots: int
    coordinator: str
    """The coordinator's URL, ``http://host:port``."""
    token: str
    advertise: str
    """The host name or address at which other hosts reach this host."""
    script: ScriptConfig
    logs: LogConfig
    env: dict[str, str] = {}
    """Variables added to the environment of every worker, with the same values (TORCHELASTIC_RUN_ID, OMP_NUM_THREADS,
    ...)."""
    topology: bytes = b""
    """This tray's entry in the rack file, as a JSON list of one
    `rackrun.topology.sources.partial_topology.PartialTopology`. Empty: there is no rack file."""
    simulated: bool = False
    """Whether the tray shares this host with other trays of the job. If so, NVML's data are used only where NVML lists
    GPUs that ``topology`` names."""
    slot_env: tuple[dict[str, str], ...] = ()
    """Variables for each slot, by index, that follow from the whole rack (NCCL's variables). They do not override the
    user's."""
    filler: FillerConfig = FillerConfig()
    nnodes: int = 1
    max_restarts: int = 3
    grace_s: float = 10.0
    """Seconds from SIGTERM to SIGKILL when a job ends."""
    lease_s: float = 15.0
    """Seconds without a message from the coordinator after which the agent asks whether it is still there."""
    stall_floor_ms: int = 1_000
    """Shortest time without progress, in milliseconds, that may count as a stall."""
