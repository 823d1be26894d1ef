"""Partition: the network between some trays and the others is cut."""

from __future__ import annotations

from typing import Literal

from rackrun.chaos.faults.fault_row import FaultRow, Need, StrikeCost, always
from rackrun.chaos.faults.fault_types import BaseFault, Family, Subjects
from rackrun.chaos.faults.profiles import Profile
from rackrun.chaos.faults.targets import A_TRAY
from rackrun.chaos.faults.virtual_strike import VirtualAgent, VirtualStrike

__all__ = ["ROW", "Partition"]


class Partition(BaseFault, frozen=True, kw_only=True, tag="partition"):
    """The network between a tray or a rack and the others is cut.

    ``isolated``: no traffic in either direction. ``one_way``: it receives, but what it sends is lost.
    ``from_coordinator``: it reaches only its peers. ``from_peers``: it reaches only the coordinator. ``loud``:
    connections are refused instead of falling silent.
    """

    family = Family.NETWORK
    strikes = (Subjects.TRAY, Subjects.RACK)
    lasts = True
    shape: Literal["isolated", "one_way", "from_coordinator", "from_peers"] = "isolated"
    loud: bool = False
    for_s: float | None = None


def _simulate(fault: Partition, strike: VirtualStrike) -> bool:
    def cut(agent: VirtualAgent) -> None:
        strike.cut(
            agent.tray,
            up=fault.shape in ("isolated", "one_way", "from_coordinator"),
            down=fault.shape in ("isolated", "from_coordinator"),
            peers=fault.shape in ("isolated", "one_way", "from_peers"),
            loud=fault.loud,
        )

    return strike.each(agent=cut)


ROW = FaultRow(
    example=Partition(),
    how="each tray on a host of its own (network namespaces); frames dropped on the switch between them",
    inject=lambda fault, tools: tools.cut_network(fault),
    refusal=lambda _fault, _kind, machine: machine.without_hosts(),
    needs=always(frozenset({Need.HOSTS})),
    simulate=_simulate,
    cost=always(StrikeCost.SUBJECTS),
    justifies_loss=always(True),
    endangers_all=always(True),
    draw=lambda d: (
        Partition(
            shape=d.choice(["isolated", "one_way", "from_coordinator", "from_peers"]),
            loud=d.random() < 0.3,
            for_s=d.choice([0.3, 1.0, 3.0]),
        ),
        A_TRAY,
    ),
    variants={
        Profile.NETWORK: lambda d, _: [
            (
                Partition(
                    shape=d.choice(["isolated", "one_way", "from_coordinator", "from_peers"]),
                    loud=d.random() < 0.3,
                    for_s=d.choice([None, 1.0, 8.0, 30.0]),
                ),
                A_TRAY,
            )
        ],
        Profile.CUT_FROM_PEERS: lambda *_: [(Partition(shape="from_peers", for_s=60.0), A_TRAY)],
        Profile.LONG: lambda *_: [(Partition(shape="isolated", for_s=1.0), A_TRAY)],
        Profile.FEW_WORKERS: lambda *_: [(Partition(shape="isolated", for_s=1.0), A_TRAY)],
    },
)
