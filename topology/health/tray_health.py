"""Judge the health of one tray's GPUs: a pure machine over readings and errors, each with its time.

A GPU gets worse at once, and better only after a calm time, so that a flapping GPU does not go back and forth. What an
Xid reported holds until the GPU is repaired: after a fatal one, a clean reading proves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from rackrun.protocol.gpu_health import SEVERITY, Evidence, GpuVerdict, Health, Response, Scope, response_to
from rackrun.topology.gpu_driver.kernel_messages import KernelXid
from rackrun.topology.gpu_driver.readings import GpuReading, NvmlUnavailable, TrayReading, XidEvent
from rackrun.topology.health.findings import against, best_of
from rackrun.topology.health.xid import ACTION_CHANGED, judge_xid

__all__ = ["GpuRepaired", "HealthPolicy", "Said", "TrayHealth"]


class HealthPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The limits for judging GPUs, in ms unless said otherwise."""

    app_max: int = 3
    """How many failed processes on one GPU within ``app_window_ms`` mean a hardware fault.

    The GPU's tray is taken out of use then.
    """
    app_window_ms: int = 3_600_000
    app_burst_ms: int = 5_000
    """Errors this close to each other count as one failed process."""
    passing_ms: int = 30_000
    """A problem that may end by itself, such as a route recovery, counts when it lasts this long."""
    calm_ms: int = 60_000
    """A GPU gets better after this long without a problem."""
    flaps_max: int = 3
    """After it got better so many times within ``app_window_ms``, a GPU stays as bad as it was."""
    recent_ms: int = 60_000
    """Xids of one GPU within this time are judged together."""


class GpuRepaired(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU was reset, or its host rebooted: earlier reports no longer count."""

    index: int


Said = TrayReading | NvmlUnavailable | XidEvent | KernelXid | GpuRepaired


@dataclass
class _Gpu:
    best: GpuReading
    """The first reading, with the links that have come up since. Only what was there can be lost."""
    last: GpuReading
    health: Health = Health.OK
    scope: Scope = "gpu"
    calm_since: int | None = None
    bettered: list[int] = field(default_factory=list)
    passing_since: dict[str, int] = field(default_factory=dict)
    said: list[Evidence] = field(default_factory=list)
    """Evidence from Xids, kept until the GPU is repaired."""
    read: list[Evidence] = field(default_factory=list)
    """Evidence from the last reading."""
    xids: list[tuple[int, int]] = field(default_factory=list)
    """(time, number) of recent Xids."""
    failed: list[int] = field(default_factory=list)
    """Times at which a process on it failed with an error of class APP."""
    announced: int | None = None
    """The recovery action that the last Xid 154 announced."""


class TrayHealth:
    """The state of one tray: ``handle(at_ms, said) -> verdicts``.

    Times are of one monotonic clock and never go back.
    """

    def __init__(self, policy: HealthPolicy | None = None) -> None:
        self._policy = policy or HealthPolicy()
        self._gpus: dict[int, _Gpu] = {}
        self._driver: int | None = None
        self.blind: NvmlUnavailable | None = None
        """Why NVML reports nothing at present; None while it does. The GPUs keep the health that was known."""
        self.strays: list[KernelXid | XidEvent] = []
        """Errors of devices that are in no reading of this tray.

        They are other kinds of devices, or their errors came before the first reading.
        """

    def handle(self, at_ms: int, said: Said) -> list[GpuVerdict]:
        """Take in a reading, an error or a repair.

        Return the verdicts that have changed, in the order of GPU indices.
        """
        match said:
            case TrayReading():
                return self._on_reading(at_ms, said)
            case NvmlUnavailable():
                self.blind = said
                for gpu in self._gpus.values():
                    gpu.calm_since = None  # no reading has shown it calm
                return []
            case XidEvent() | KernelXid():
                return self._on_xid(at_ms, said)
            case GpuRepaired():
                return self._on_repaired(at_ms, said)

    def health(self, index: int) -> Health:
        return self._gpus[index].health

    # -- readings
    def _on_reading(self, at_ms: int, reading: TrayReading) -> list[GpuVerdict]:
        self.blind = None
        self._driver = reading.driver_branch
        verdicts: list[GpuVerdict] = []
        listed = {gpu.index: gpu for gpu in reading.gpus}
        for index in sorted(listed.keys() | self._gpus.keys()):
            seen, known = listed.get(index), self._gpus.get(index)
            if seen is None and known is not None:
                known.read = [_evidence(at_ms, Health.LOST, "the driver does not list it any more")]
            elif seen is not None and (known is None or _other(seen, known.best)):
                replaced = known is not None and known.health is not Health.OK
                known = self._gpus[index] = _Gpu(best=seen, last=seen)
                self._read(at_ms, known, seen, None)
                if replaced and not known.read:
                    verdicts.append(self._verdict(at_ms, index, known, []))
            elif seen is not None and known is not None:
                self._read(at_ms, known, seen, known.best)
            assert known is not None
            verdicts += self._settle(at_ms, index, known)
        return verdicts

    def _read(self, at_ms: int, gpu: _Gpu, reading: GpuReading, before: GpuReading | None) -> None:
        if reading.recovery_action is not None:
            gpu.announced = None  # the reading just taken is newer
        found = against(reading, before)
        passing = {finding.what for finding in found if finding.passing}
        gpu.passing_since = {what: gpu.passing_since.get(what, at_ms) for what in sorted(passing)}
        gpu.read = [
            _evidence(at_ms, finding.health, finding.what, finding.fabric, finding.scope)
            for finding in found
            if not finding.passing or at_ms - gpu.passing_since[finding.what] >= self._policy.passing_ms
        ]
        gpu.last = reading
        gpu.best = best_of(gpu.best, reading)

    # -- errors
    def _on_xid(self, at_ms: int, event: XidEvent | KernelXid) -> list[GpuVerdict]:
        index = self._index_of(event)
        if index is None:
            self.strays = [*self.strays[-99:], event]
            return []
        gpu, policy = self._gpus[index], self._policy
        live = event.live if isinstance(event, XidEvent) else None
        kernel = event if isinstance(event, KernelXid) else None
        if event.xid == ACTION_CHANGED:
            if kernel and kernel.action is not None:
                live = kernel.action
            gpu.announced = live or None  # none wanted: that says nothing about the next error
        gpu.xids = [(at, xid) for at, xid in gpu.xids if at_ms - at <= policy.recent_ms]
        judged = judge_xid(
            event.xid,
            live=live,
            announced=gpu.announced,
            driver=self._driver,
            nvlink=kernel.nvlink if kernel else None,
            recent=frozenset(xid for _, xid in gpu.xids),
        )
        gpu.xids.append((at_ms, event.xid))
        said = Evidence(
            at_ms=at_ms,
            source="kernel log" if kernel else "nvml",
            what=judged.why,
            health=judged.health,
            fabric=judged.fabric,
            scope=response_to(judged.health)[1],
        )
        if judged.health is Health.APP:
            return self._process_failed(at_ms, index, gpu, said)
        if judged.health is not Health.OK:
            gpu.said.append(said)
        return self._settle(at_ms, index, gpu)

    def _process_failed(self, at_ms: int, index: int, gpu: _Gpu, said: Evidence) -> list[GpuVerdict]:
        """Count a failed process; after too many the GPU counts as degraded."""
        policy = self._policy
        gpu.failed = [at for at in gpu.failed if at_ms - at < policy.app_window_ms]
        if gpu.failed and at_ms - gpu.failed[-1] < policy.app_burst_ms:
            return []
        gpu.failed.append(at_ms)
        if len(gpu.failed) >= policy.app_max:
            what = f"{len(gpu.failed)} processes failed on it within {policy.app_window_ms // 60_000} minutes; the last: {said.what}"
            gpu.said.append(_evidence(at_ms, Health.DEGRADED, what, scope="tray", source=said.source))
            return self._settle(at_ms, index, gpu)
        return [] if gpu.health is not Health.OK else [self._verdict(at_ms, index, gpu, [said], Health.APP)]

    def _index_of(self, event: XidEvent | KernelXid) -> int | None:
        for index, gpu in self._gpus.items():
            if isinstance(event, XidEvent) and (index == event.index or (event.uuid and event.uuid == gpu.last.uuid)):
                return index
            if event.bdf and event.bdf == (gpu.last.bdf or gpu.best.bdf):
                return index
        return None

    def _on_repaired(self, at_ms: int, event: GpuRepaired) -> list[GpuVerdict]:
        known = self._gpus.get(event.index)
        if known is None:
            return []
        fresh = self._gpus[event.index] = _Gpu(best=known.best, last=known.last)
        return [] if known.health is Health.OK else [self._verdict(at_ms, event.index, fresh, [])]

    # -- judgement
    def _settle(self, at_ms: int, index: int, gpu: _Gpu) -> list[GpuVerdict]:
        """Compare the evidence with the GPU's present health, and return a verdict if it changes."""
        evidence = [*gpu.said, *gpu.read]
        now = max((one.health for one in evidence), key=SEVERITY.__getitem__, default=Health.OK)
        worst = [one for one in evidence if one.health is now]
        scope: Scope = "tray" if any(one.scope == "tray" for one in worst) else response_to(now)[1]
        worse = SEVERITY[now] > SEVERITY[gpu.health]
        if worse or (now is gpu.health and scope != gpu.scope and scope == "tray"):
            gpu.health, gpu.scope, gpu.calm_since = now, scope, None
            return [self._verdict(at_ms, index, gpu, evidence)]
        if now is gpu.health:
            gpu.calm_since = None
            return []
        return self._better(at_ms, index, gpu, now, scope, evidence)

    def _better(
        self, at_ms: int, index: int, gpu: _Gpu, now: Health, scope: Scope, evidence: list[Evidence]
    ) -> list[GpuVerdict]:
        """Make a GPU better once it was calm long enough, unless it has flapped too often."""
        policy = self._policy
        gpu.calm_since = at_ms if gpu.calm_since is None else gpu.calm_since
        if at_ms - gpu.calm_since < policy.calm_ms:
            return []
        gpu.bettered = [at for at in gpu.bettered if at_ms - at < policy.app_window_ms]
        if len(gpu.bettered) >= policy.flaps_max:
            what = f"it got better and worse {policy.flaps_max} times within {policy.app_window_ms // 60_000} minutes"
            gpu.said.append(_evidence(at_ms, gpu.health, what, scope=gpu.scope, source="history"))
            gpu.calm_since = None
            return []
        gpu.bettered.append(at_ms)
        gpu.health, gpu.scope, gpu.calm_since = now, scope, None
        return [self._verdict(at_ms, index, gpu, evidence)]

    def _verdict(
        self, at_ms: int, index: int, gpu: _Gpu, evidence: list[Evidence], health: Health | None = None
    ) -> GpuVerdict:
        health = health or gpu.health
        response, scope, repair = response_to(health)
        if gpu.scope == "tray" and response is not Response.RESTART:
            scope = "tray"
        return GpuVerdict(
            at_ms=at_ms,
            uuid=gpu.last.uuid or gpu.best.uuid,
            index=index,
            health=health,
            response=response,
            scope=scope,
            repair=repair,
            evidence=tuple(evidence),
        )


def _evidence(
    at_ms: int, health: Health, what: str, fabric: bool = False, scope: Scope = "gpu", source: str = "nvml"
) -> Evidence:
    return Evidence(at_ms=at_ms, source=source, what=what, health=health, fabric=fabric, scope=scope)


def _other(seen: GpuReading, known: GpuReading) -> bool:
    """Whether another GPU is in that place now: after a repair the UUID differs."""
    return bool(seen.uuid and known.uuid and seen.uuid != known.uuid)
