"""The circuit breaker: what many trays say at once is not about the trays.

Verdicts of all trays pass through it before anything is taken out of use. Two rules: when too many trays would go within
a short time nothing more goes, and a person is asked; and when GPUs of several trays of one clique have lost their fabric at
once, it is the switch: its GPUs are kept, and the clique is reported.

What has really died is found by the runtime anyway: holding a verdict back stops a swap or a fence in advance, no recovery.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from rackrun.protocol.gpu_health import Health, Response, Verdict
from rackrun.topology.model.racks import CliqueId

__all__ = ["Breaker", "BreakerPolicy", "Passed", "SwitchSuspected", "Withheld"]


class BreakerPolicy(msgspec.Struct, frozen=True, kw_only=True):
    share: float = 0.5
    """Of the trays. When more than this go within ``window_ms``, and more than one, nothing more goes until `Breaker.reset`."""
    window_ms: int = 300_000
    gather_ms: int = 500
    """How long a verdict about the fabric waits for others of its clique."""
    switch_trays: int = 2
    """Trays of one clique with evidence against the fabric within ``switch_window_ms``: it is the switch."""
    switch_window_ms: int = 10_000


class Passed(msgspec.Struct, frozen=True, kw_only=True):
    """Act on it."""

    tray: str
    verdict: Verdict


class Withheld(msgspec.Struct, frozen=True, kw_only=True):
    """Do not act on it; say so."""

    tray: str
    verdict: Verdict
    reason: str


class SwitchSuspected(msgspec.Struct, frozen=True, kw_only=True):
    """Look at the NVLink switches of this clique; its GPUs are not to blame."""

    at_ms: int
    clique: CliqueId
    trays: tuple[str, ...]
    reason: str


Decision = Passed | Withheld | SwitchSuspected


class Breaker:
    """``handle(at_ms, tray, verdict)`` and ``tick(at_ms)``, both to decisions. ``wake_at_ms`` is when to tick next."""

    def __init__(self, trays: Mapping[str, CliqueId | None], policy: BreakerPolicy | None = None) -> None:
        self._clique_of = dict(trays)
        self._policy = policy or BreakerPolicy()
        self._gone: dict[str, int] = {}
        """Tray -> when it was last taken out of use."""
        self._fabric: dict[CliqueId, dict[str, int]] = {}
        """Clique -> tray -> when it last spoke against the fabric."""
        self._suspected: dict[CliqueId, int] = {}
        self._waiting: list[tuple[int, str, Verdict]] = []
        self.open_since_ms: int | None = None
        self.withheld: dict[tuple[str, int], Withheld] = {}
        """By tray and GPU: what was not acted on. A verdict is told once, so whoever resets the breaker looks here."""

    def learn(self, trays: Mapping[str, CliqueId | None]) -> None:
        """More trays, or other cliques."""
        self._clique_of.update(trays)

    def forget(self, tray: str) -> None:
        """The tray is lost: what was said of its GPUs and not acted on may be so no more when it comes back."""
        self._waiting = [one for one in self._waiting if one[1] != tray]
        self.withheld = {at: one for at, one in self.withheld.items() if at[0] != tray}

    @property
    def wake_at_ms(self) -> int | None:
        return min((until for until, _, _ in self._waiting), default=None)

    def reset(self) -> None:
        """A person has looked."""
        self.open_since_ms = None
        self._gone.clear()
        self._suspected.clear()
        self._fabric.clear()
        self.withheld.clear()

    def handle(self, at_ms: int, tray: str, verdict: Verdict) -> list[Decision]:
        """What is to be done about it, and about what has waited long enough."""
        self.withheld.pop((tray, verdict.index), None)
        self._waiting = [one for one in self._waiting if (one[1], one[2].index) != (tray, verdict.index)]
        return self._noted([*self._ripe(at_ms), *self._decide(at_ms, tray, verdict)])

    def tick(self, at_ms: int) -> list[Decision]:
        """What has waited long enough."""
        return self._noted(self._ripe(at_ms))

    def _decide(self, at_ms: int, tray: str, verdict: Verdict) -> list[Decision]:
        if verdict.response not in {Response.SWAP, Response.FENCE}:
            return [Passed(tray=tray, verdict=verdict)]
        clique = self._clique_of.get(tray)
        if not verdict.fabric or clique is None:
            return [self._quarantine(at_ms, tray, verdict)]
        decisions = self._against_fabric(at_ms, tray, clique)
        if clique in self._suspected:
            return [*decisions, _blame_the_switch(tray, verdict, clique)]
        self._waiting.append((at_ms + self._policy.gather_ms, tray, verdict))
        return decisions

    def _ripe(self, at_ms: int) -> list[Decision]:
        for clique, since in list(self._suspected.items()):
            if at_ms - since > self._policy.window_ms:
                del self._suspected[clique]
        due = [entry for entry in self._waiting if entry[0] <= at_ms]
        self._waiting = [entry for entry in self._waiting if entry[0] > at_ms]
        return [self._quarantine(at_ms, tray, verdict) for _, tray, verdict in due]

    def _noted(self, decisions: list[Decision]) -> list[Decision]:
        for decision in decisions:
            if isinstance(decision, Withheld):
                self.withheld[decision.tray, decision.verdict.index] = decision
        return decisions

    def _against_fabric(self, at_ms: int, tray: str, clique: CliqueId) -> list[Decision]:
        """Notes it; when this makes the switch a suspect, says so and gives up what waited for the same reason."""
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
        waited = [entry for entry in self._waiting if self._clique_of.get(entry[1]) == clique]
        self._waiting = [entry for entry in self._waiting if entry not in waited]
        suspected = SwitchSuspected(at_ms=at_ms, clique=clique, trays=trays, reason=reason)
        return [suspected, *(_blame_the_switch(one, verdict, clique) for _, one, verdict in waited)]

    def _quarantine(self, at_ms: int, tray: str, verdict: Verdict) -> Decision:
        if verdict.health is Health.LOST:  # it is gone, whatever is decided
            return Passed(tray=tray, verdict=verdict)
        policy = self._policy
        self._gone = {one: at for one, at in self._gone.items() if at_ms - at <= policy.window_ms}
        if self.open_since_ms is None:
            going = self._gone.keys() | {tray}
            if len(going) <= max(1, policy.share * len(self._clique_of)):
                self._gone[tray] = at_ms
                return Passed(tray=tray, verdict=verdict)
            self.open_since_ms = at_ms
        reason = (
            f"more than {policy.share:.0%} of {len(self._clique_of)} trays would go within {policy.window_ms // 1000} s:"
            " nothing more is taken out of use until a person has looked"
        )
        return Withheld(tray=tray, verdict=verdict, reason=reason)


def _blame_the_switch(tray: str, verdict: Verdict, clique: CliqueId) -> Withheld:
    return Withheld(tray=tray, verdict=verdict, reason=f"the switches of clique {clique} are suspected, not this GPU")
