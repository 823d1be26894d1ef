"""Link: the link between an agent and the coordinator is bad."""

from __future__ import annotations

import random

from rackrun.chaos.faults.fault_row import FaultAndTarget, FaultRow, Need, StrikeCost, always
from rackrun.chaos.faults.fault_types import BaseFault, Complaint, Family, Subjects
from rackrun.chaos.faults.profiles import Profile
from rackrun.chaos.faults.strike_tools import Injected, Machine, StrikeTools
from rackrun.chaos.faults.targets import AN_AGENT
from rackrun.chaos.faults.virtual_strike import VirtualAgent, VirtualStrike

__all__ = ["ROW", "Link"]

_SENT_AGAIN_S = 0.2
"""Seconds that a lost packet costs in the simulator: it is sent again."""


class Link(BaseFault, frozen=True, kw_only=True, tag="link"):
    """The link between an agent and the coordinator is bad.

    ``latency_s`` and ``jitter_s``: delay in seconds, fixed and random. ``lost``: the share of packets that is lost.
    ``bytes_per_s``: the bandwidth. ``reset``: connections are reset, new ones included. ``half_open``: the
    coordinator's side is closed and the agent does not learn of it. ``replies_lost``: what the agent sends arrives,
    what is sent to it is lost.
    """

    family = Family.NETWORK
    strikes = (Subjects.AGENT,)
    lasts = True
    latency_s: float = 0.0
    jitter_s: float = 0.0
    lost: float = 0.0
    bytes_per_s: float | None = None
    reset: bool = False
    half_open: bool = False
    replies_lost: bool = False
    for_s: float | None = None


def _inject(fault: Link, tools: StrikeTools) -> Injected:
    parts: list[Injected] = []
    if fault.lost:
        parts.append(tools.lose_packets(fault.lost))
    if _bad_bytes(fault):
        parts.append(tools.spoil_links(fault))
    return tools.both(*parts)


def _refusal(fault: Link, _: Subjects, machine: Machine) -> Complaint | None:
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
    return machine.without_hosts()


def _bad_bytes(fault: Link) -> bool:
    """Whether the fault changes bytes or connections, which takes the proxy, rather than only losing packets."""
    slow = fault.latency_s or fault.jitter_s or fault.bytes_per_s is not None
    return bool(slow or fault.reset or fault.half_open or fault.replies_lost)


def _simulate(fault: Link, strike: VirtualStrike) -> bool:
    slow_s = 1000 / fault.bytes_per_s if fault.bytes_per_s else 0.0

    def spoil(agent: VirtualAgent) -> None:
        strike.slow_link(
            agent.tray, latency_s=fault.latency_s + slow_s, jitter_s=fault.jitter_s + fault.lost * _SENT_AGAIN_S * 10
        )
        if fault.reset or fault.half_open:
            strike.break_link(agent.tray, half_open=fault.half_open)

    return strike.each(agent=spoil)


def _draw(d: random.Random) -> FaultAndTarget[Link]:
    return d.choice(
        [
            (Link(latency_s=0.1 * d.random(), jitter_s=0.1 * d.random(), for_s=2.0), AN_AGENT),
            (Link(lost=0.2, for_s=2.0), AN_AGENT),
            (Link(reset=True, for_s=1.0), AN_AGENT),
            (Link(half_open=True, for_s=1.0), AN_AGENT),
            (Link(bytes_per_s=20_000.0, for_s=2.0), AN_AGENT),
        ]
    )


def _in_fuzz(d: random.Random, _: float | None) -> list[FaultAndTarget[Link]]:
    slow = Link(latency_s=d.random(), jitter_s=d.random(), lost=0.1, reset=d.random() < 0.3, for_s=10.0)
    return [(slow, AN_AGENT), (Link(half_open=True, for_s=1.0), AN_AGENT)]


ROW = FaultRow(
    example=Link(latency_s=0.1),
    how="the same, with a proxy before the coordinator; lost packets on the switch",
    inject=_inject,
    refusal=_refusal,
    needs=always(frozenset({Need.HOSTS, Need.PROXY})),
    simulate=_simulate,
    not_simulated=lambda fault, _: "its links have no bytes to lose" if fault.replies_lost else "",
    cost=always(StrikeCost.SUBJECTS),
    justifies_loss=always(True),
    endangers_all=always(True),
    draw=_draw,
    variants={
        Profile.NETWORK: _in_fuzz,
        Profile.FEW_CONNECTIONS: lambda *_: [(Link(latency_s=0.3, jitter_s=0.5, for_s=10.0), AN_AGENT)],
    },
)
