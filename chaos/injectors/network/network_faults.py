"""Decide which network faults a job can have, and begin them."""

from __future__ import annotations

from collections.abc import Callable

from rackrun.chaos.faults.fault_types import Link, Partition, Subjects
from rackrun.chaos.faults.targets import Scene, Subject
from rackrun.chaos.injectors.common.injection import All, Injected, Missed
from rackrun.chaos.injectors.network.link_faults import BadLink
from rackrun.chaos.injectors.network.packet_filters import Lossy, Partitioned
from rackrun.chaos.plan.conductor import Strike
from rackrun.chaos.testbed.job_under_test import Job
from rackrun.chaos.testbed.network.hosts import hosts_here

__all__ = ["network_refusal", "strike_network"]


def network_refusal(fault: Partition | Link) -> tuple[str, str] | None:
    """Return why this machine or a job cannot have the fault, as `rackrun.chaos.injectors.refusal` does."""
    return (_link_refusal(fault) if isinstance(fault, Link) else None) or hosts_here()


def strike_network(
    strike: Strike, fault: Partition | Link, scene: Scene, job: Job, seed: Callable[[], int]
) -> Injected:
    """Begin a network fault. Raises `Missed` when a subject has no host, and OSError when the machine refuses."""
    assert job.hosts is not None, "made before the job is, for a plan with such a fault"
    groups = [_trays(subject, scene, job.hosts.trays) for subject in strike.subjects]
    if isinstance(fault, Partition):
        return Partitioned(groups, fault, strike.number, job.hosts, job.undo)
    trays = [tray for group in groups for tray in group]
    parts: list[Injected] = []
    if fault.lost:
        parts.append(Lossy(trays, fault.lost, strike.number, job.hosts, job.undo))
    if _bad_bytes(fault):
        assert job.links is not None, "made with the hosts"
        parts.append(BadLink(trays, fault, strike.number, seed(), job.links))
    return All(parts)


def _trays(subject: Subject, scene: Scene, there: tuple[str, ...]) -> list[str]:
    """Return the trays of ``subject`` that have hosts, in order. Raises `Missed` if there are none."""
    named = [subject.name] if subject.kind is not Subjects.RACK else {place.tray for place in scene.of(subject)}
    found = sorted(tray for tray in named if tray in there)
    if not found:
        raise Missed(f"{subject} has no host")
    return found


def _link_refusal(fault: Link) -> tuple[str, str] | None:
    if not 0 <= fault.lost <= 1:
        return f"a share of {fault.lost} packets cannot be lost", "give one between 0 and 1"
    if min(fault.latency_s, fault.jitter_s) < 0 or (fault.bytes_per_s is not None and fault.bytes_per_s <= 0):
        return (
            "a link is never faster than nothing, or slower than not at all",
            "give times of 0 or more, bytes_per_s above 0",
        )
    ways = fault.reset + fault.half_open + fault.replies_lost
    if ways > 1 or not (ways or fault.lost or _bad_bytes(fault)):
        return "a link with no fault, or with two of reset, half_open and replies_lost", "give one of them"
    return None


def _bad_bytes(fault: Link) -> bool:
    """Whether the fault changes bytes or connections, which takes the proxy, rather than only losing packets."""
    slow = fault.latency_s or fault.jitter_s or fault.bytes_per_s is not None
    return bool(slow or fault.reset or fault.half_open or fault.replies_lost)
