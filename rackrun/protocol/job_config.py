"""The core's configuration of a job, fixed when the job begins."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from rackrun.protocol.policy_types import Rules, Weights

__all__ = ["JobConfig", "SlowRanks"]

SlowRanks: TypeAlias = Literal["notice", "swap", "shift", "swap,shift", "off"]


class JobConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The user's options as the core uses them. Times end in ``_ms`` (milliseconds) or ``_s`` (seconds)."""

    trays_min: int
    """Trays that must have joined before the world is formed (``--nnodes MIN:MAX``)."""
    trays_max: int
    spares: int
    """Number of existing slots that are held back as spares. WORLD_SIZE is the number of the others."""
    mesh: tuple[tuple[str, int], ...] = ()
    """Axes and sizes, in order (``--mesh``). Their product is WORLD_SIZE, and slots beyond it wait. (): one axis over
    all ranks."""
    cross_clique: bool = False
    """Whether a group that belongs in one NVLink clique may continue over the network if no clique has room for it."""
    pause_timeout_ms: int = 60_000
    """How long to wait for ranks to pause for a planned swap. After that the swap is done as after a loss."""
    slow_ranks: SlowRanks = "notice"
    """What is done about a rank that is persistently slower than its peers.

    ``notice``: it is reported. ``swap``: it is also replaced. ``shift``: it gets fewer micro-batches. ``swap,shift``:
    it is replaced, and gets fewer micro-batches until then. ``off``: slow ranks are not looked for.
    """
    snapshot_copies: Literal["local", "mirror", "xor", "rs"] = "mirror"
    """What other trays keep of snapshots: nothing, a copy, XOR parity or Reed-Solomon parity."""
    set_size: int = 8
    """Number of members of a set (``xor``, ``rs``), if there are that many trays."""
    set_parity: int = 1
    """Number of members of a set that may be lost at once."""
    min_ranks: int = 0
    """Smallest number of ranks to which the world may shrink when nobody takes over lost ranks (``--min-ranks``); 0: it
    never shrinks."""
    max_restarts: int = 3
    """How many times the whole world may restart (plain scripts, a failure before the first step, lost state). Swaps do
    not count."""
    start_over: bool = False
    """Whether the job begins again when the last copy of some state is lost, from the newest checkpoint on disk or from
    step 0. If not, the job stops, unless it has just begun."""
    join_timeout_ms: int = 600_000
    """How long to wait from the start until ``trays_min`` trays have joined. After that the job stops with a reason."""
    last_call_ms: int = 1_000
    """How long to wait for more trays once ``trays_min`` have joined."""
    gather_ms: int = 5
    """Faults within this time of the first are handled as one. Survivors are broken at once, without waiting for it."""
    park_timeout_ms: int = 5_000
    """A worker that does not answer BreakGeneration for this long is fenced."""
    lease_ms: int = 15_000
    """Time without a message after which a tray is given up (``--lease``). A tray of which nothing has come in a
    recovery may be waited for as long."""
    resume_timeout_ms: int = 30_000
    """A member that has not resumed after this long is fenced."""
    reenter_timeout_ms: int = 300_000
    """As ``resume_timeout_ms``, when all ranks enter ``main`` again, which may take as long as a start."""
    no_progress_max: int = 8
    """Number of consecutive recoveries without a committed step after which the job stops."""
    rules: Rules = Rules()
    """Which rungs may be taken (``--policy``)."""
    weights: Weights = Weights()
    policy_function: str = ""
    """``module:function`` that is asked first (`AskPolicy`); "": none."""
    repair_patience_ms: int = 0
    """How long all ranks wait for hardware to come back or to be added when there is neither a spare nor a free
    slot."""
    provider: str = ""
    """The provider that is asked for more racks (`RequestRack`); "": none."""
    provider_expected_s: float | None = None
    """How long a request takes according to the provider. None: it does not say."""
    acquire_timeout_ms: int = 3_600_000
    """A request that has not brought a rack for this long is withdrawn."""
    rack_join_ms: int = 120_000
    """How long a delivered rack's trays may take to join."""
