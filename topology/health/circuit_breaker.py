"""The circuit breaker: verdicts from many trays at once suggest a common cause, and are not acted on.

Verdicts of all trays pass through it before anything is taken out of use. It has two rules. When too many trays would
be taken out of use within a short time, nothing more is, until a person has looked. When GPUs of several trays of one
clique lose their fabric at once, the switch is suspected: the GPUs are kept, and the clique is reported.

The runtime notices dead ranks anyway. So withholding a verdict prevents a swap or a fence in advance, but no recovery.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from rackrun.protocol.gpu_health import GpuVerdict, Health, Response
from rackrun.topology.model.racks import CliqueId

__all__ = ["Breaker", "BreakerPolicy", "PassedVerdict", "SwitchSuspected", "WithheldVerdict"]


class BreakerPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of the breaker."""

    share: float = 0.5
    """A share of all trays.

    If more (and more than one) go within ``window_ms``, nothing more goes until `Breaker.reset`.
    """
    window_ms: int = 300_000
    gather_ms: int = 500
    """How long a verdict about the fabric waits for others of its clique."""
    switch_trays: int = 2
    """When so many trays of one clique report the fabric within ``switch_window_ms``, the switch is suspected."""
    switch_window_ms: int = 10_000


class PassedVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict to act on."""

    tray: str
    verdict: GpuVerdict


class WithheldVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict not to act on, but to report."""

    tray: str
    verdict: GpuVerdict
    reason: str


class SwitchSuspected(msgspec.Struct, frozen=True, kw_only=True):
    """The NVLink switches of this clique are suspected; its GPUs are not to blame."""

    at_ms: int
    clique: CliqueId
    trays: tuple[str, ...]
    reason: str


Decision = PassedVerdict | WithheldVerdict | SwitchSuspected


class Breaker:
    """Decides which verdicts to act on: ``handle(at_ms, tray, verdict)``, and ``tick(at_ms)`` at ``wake_at_ms``."""

    def __init__(self, trays: Mapping[str, CliqueId | None], policy: BreakerPolicy | None = None) -> None:
        self._clique_of = dict(trays)
        self._policy = policy or BreakerPolicy()
        self._gone: dict[str, int] = {}
        """Tray -> when it was last taken out of use."""
        self._fabric: dict[CliqueId, dict[str, int]] = {}
        """Clique -> tray -> when it last had a verdict against the fabric."""
        self._suspected: dict[CliqueId, int] = {}
        self.waiting: list[tuple[int, str, GpuVerdict]] = []
        """Verdicts against the fabric that wait for others: until when, the tray, and the verdict."""
        self.open_since_ms: int | None = None
        self.withheld: dict[tuple[str, int], WithheldVerdict] = {}
        """(tray, GPU index) -> the verdict that was not acted on.

        A verdict is reported once, so look here after the breaker is reset.
        """

    def learn(self, trays: Mapping[str, CliqueId | None]) -> None:
        """Add trays, or change their cliques."""
        self._clique_of.update(trays)

    def forget(self, tray: str) -> None:
        """Drop what waits or was withheld for a lost tray: it may no longer hold when the tray comes back."""
        self.waiting = [one for one in self.waiting if one[1] != tray]
        self.withheld = {at: one for at, one in self.withheld.items() if at[0] != tray}

    @property
    def wake_at_ms(self) -> int | None:
        return min((until for until, _, _ in self.waiting), default=None)

    def reset(self) -> None:
        """Close the breaker again, after a person has looked."""
        self.open_since_ms = None
        self._gone.clear()
        self._suspected.clear()
        self._fabric.clear()
        self.withheld.clear()

    def handle(self, at_ms: int, tray: str, verdict: GpuVerdict) -> list[Decision]:
        """Return what to do about a verdict, and about earlier ones that have waited long enough."""
        self.withheld.pop((tray, verdict.index), None)
        self.waiting = [one for one in self.waiting if (one[1], one[2].index) != (tray, verdict.index)]
        return self._noted([*self._ripe(at_ms), *self._decide(at_ms, tray, verdict)])

    def tick(self, at_ms: int) -> list[Decision]:
        """Return what to do about verdicts that have waited long enough."""
        return self._noted(self._ripe(at_ms))

    def _decide(self, at_ms: int, tray: str, verdict: GpuVerdict) -> list[Decision]:
        if verdict.response not in {Response.SWAP, Response.FENCE}:
            return [PassedVerdict(tray=tray, verdict=verdict)]
        clique = self._clique_of.get(tray)
        if not verdict.fabric or clique is None:
            return [self._quarantine(at_ms, tray, verdict)]
        decisions = self._against_fabric(at_ms, tray, clique)
        if clique in self._suspected:
            return [*decisions, _blame_the_switch(tray, verdict, clique)]
        self.waiting.append((at_ms + self._policy.gather_ms, tray, verdict))
        return decisions

    def _ripe(self, at_ms: int) -> list[Decision]:
        for clique, since in list(self._suspected.items()):
            if at_ms - since > self._policy.window_ms:
                del self._suspected[clique]
        due = [entry for entry in self.waiting if entry[0] <= at_ms]
        self.waiting = [entry for entry in self.waiting if entry[0] > at_ms]
        return [self._quarantine(at_ms, tray, verdict) for _, tray, verdict in due]

    def _noted(self, decisions: list[Decision]) -> list[Decision]:
        for decision in decisions:
            if isinstance(decision, WithheldVerdict):
                self.withheld[decision.tray, decision.verdict.index] = decision
        return decisions

    def _against_fabric(self, at_ms: int, tray: str, clique: CliqueId) -> list[Decision]:
        """Note a report against the fabric.

        If it makes the switch a suspect, report that, and withhold the waiting verdicts.
        """
        policy = self._policy
        spoke = self._fabric.setdefault(clique, {})
        spoke[tray] = at_ms
        trays = tuple(sorted(one for one, at in spoke.items() if at_ms - at <= policy.switch_window_ms))
        if len(trays) < policy.switch_trays:
            return []
        first = clique not in self._suspected
        self._suspected[clique] = at_ms
        if not first:
            return []
        reason = (
            f"{len(trays)} trays of clique {clique} have lost NVLink within {policy.switch_window_ms / 1000:g} s"
            f" ({', '.join(trays)}): a switch or the fabric manager, not their GPUs"
        )
        waited = [entry for entry in self.waiting if self._clique_of.get(entry[1]) == clique]
        self.waiting = [entry for entry in self.waiting if entry not in waited]
        suspected = SwitchSuspected(at_ms=at_ms, clique=clique, trays=trays, reason=reason)
        return [suspected, *(_blame_the_switch(one, verdict, clique) for _, one, verdict in waited)]

    def _quarantine(self, at_ms: int, tray: str, verdict: GpuVerdict) -> Decision:
        if verdict.health is Health.LOST:  # the GPU is gone, whatever is decided
            return PassedVerdict(tray=tray, verdict=verdict)
        policy = self._policy
        self._gone = {one: at for one, at in self._gone.items() if at_ms - at <= policy.window_ms}
        if self.open_since_ms is None:
            going = self._gone.keys() | {tray}
            if len(going) <= max(1, policy.share * len(self._clique_of)):
                self._gone[tray] = at_ms
                return PassedVerdict(tray=tray, verdict=verdict)
            self.open_since_ms = at_ms
        reason = (
            f"more than {policy.share:.0%} of {len(self._clique_of)} trays would go within {policy.window_ms // 1000} s:"
            " nothing more is taken out of use until a person has looked"
        )
        return WithheldVerdict(tray=tray, verdict=verdict, reason=reason)


def _blame_the_switch(tray: str, verdict: GpuVerdict, clique: CliqueId) -> WithheldVerdict:
    return WithheldVerdict(
        tray=tray, verdict=verdict, reason=f"the switches of clique {clique} are suspected, not this GPU"
    )
