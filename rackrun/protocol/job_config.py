"""What the core is told when a job begins."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from rackrun.protocol.policy_types import Rules, Weights

__all__ = ["JobConfig", "SlowRanks"]

SlowRanks: TypeAlias = Literal["notice", "swap", "shift", "swap,shift", "off"]


class JobConfig(msgspec.Struct, frozen=True, kw_only=True):
    trays_min: int
    """Trays that must have joined before the world is formed (``--nnodes MIN:MAX``)."""
    trays_max: int
    spares: int
    """Slots held back, out of those that exist. WORLD_SIZE is the rest."""
    mesh: tuple[tuple[str, int], ...] = ()
    """Axes and sizes, in order (``--mesh``); their product is WORLD_SIZE, and what is left over waits. () : one axis over all."""
    cross_clique: bool = False
    """Let a group that belongs into one NVLink clique go on over the network, where no clique has room for it."""
    pause_timeout_ms: int = 60_000
    """Ranks that have not paused for a planned swap after this long are not waited for: the swap is made as after a loss."""
    slow_ranks: SlowRanks = "notice"
    """What is done about a rank that is slower than its peers for long: it is said; it is replaced too; it gets fewer micro-batches;
    replaced, and until then fewer; nobody looks."""
    snapshot_copies: Literal["local", "mirror", "xor", "rs"] = "mirror"
    """What other trays keep of snapshots."""
    set_size: int = 8
    """Members of a set (``xor``, ``rs``), where there are as many trays."""
    set_parity: int = 1
    """Of which so many may be lost at once."""
    min_ranks: int = 0
    """How far the world may shrink when nobody takes lost ranks over (``--min-ranks``); 0: not at all."""
    max_restarts: int = 3
    """Restarts of the whole world (plain scripts, a failure before the first step, state lost). Swaps do not count."""
    start_over: bool = False
    """When the last copy of some state is lost: begin again, from the newest checkpoint on disk or from step 0. Else the job stops, unless it has just begun."""
    join_timeout_ms: int = 600_000
    """From the start until ``trays_min`` have joined; then the job stops with a reason."""
    last_call_ms: int = 1_000
    """With ``trays_min`` joined, how long to wait for more."""
    gather_ms: int = 5
    """Faults within this time of the first are one decision. Survivors are broken at once, without waiting for it."""
    park_timeout_ms: int = 5_000
    """A worker that does not answer BreakGeneration for this long is fenced."""
    resume_timeout_ms: int = 30_000
    """A member that has not resumed after this long is fenced."""
    reenter_timeout_ms: int = 300_000
    """The same where all enter ``main`` again, which may take as long as a start."""
    no_progress_max: int = 8
    """Recoveries in a row without one committed step before the job stops."""
    rules: Rules = Rules()
    """Which rungs may be taken (``--policy``)."""
    weights: Weights = Weights()
    policy_function: str = ""
    """``module:function`` that is asked first (`AskPolicy`); "": nobody is."""
    repair_patience_ms: int = 0
    """How long all stand still for hardware to come back or to be added, where no spare and no free slot is left."""
    provider: str = ""
    """Who is asked for other racks (`RequestRack`); "": nobody."""
    provider_expected_s: float | None = None
    """How long that takes, as the provider says."""
    acquire_timeout_ms: int = 3_600_000
    """A request that has brought nothing for so long is taken back."""
    rack_join_ms: int = 120_000
    """So long after a rack is said to be there its trays must have joined."""
