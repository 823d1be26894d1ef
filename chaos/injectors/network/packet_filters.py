"""Cut the network between the job's hosts, or lose packets on it, by nf_tables rules.

The hosts are those of `rackrun.chaos.testbed.network.hosts`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from rackrun.chaos.faults.strike_tools import CutShape
from rackrun.chaos.injectors.common.injection import CONFIRM_S, Missed, StrikeOutcome
from rackrun.chaos.testbed.machine.undo_log import RemoveRules, UndoLog
from rackrun.chaos.testbed.network.hosts import HEAD, Hosts

__all__ = ["Lossy", "Partitioned"]


class _Filtered:
    """Tables of nf_tables, each in one network namespace. The fault has taken effect when every counter in them has
    seen a packet."""

    def __init__(self, hosts: Hosts, undo: UndoLog) -> None:
        self._began_s = time.monotonic()
        self._hosts, self._undo = hosts, undo
        self._tables: list[tuple[str, str, str]] = []
        """Namespace, family and name of each table."""
        self._records: list[int] = []
        self._to_move: dict[str, tuple[str, str]] = {}
        """Counter -> the hosts between which a connection attempt makes it move: from, to."""

    def outcome(self) -> StrikeOutcome | None:
        moved: dict[str, int] = {}
        for table in self._tables:
            moved |= self._hosts.counters(*table)
        still = [name for name in self._to_move if not moved.get(name)]
        if not still:
            return StrikeOutcome(True, f"{sum(moved.values())} packets did not come through so far")
        for name in still:
            self._hosts.knock(*self._to_move[name])
        if time.monotonic() - self._began_s < CONFIRM_S:
            return None
        lively = ", ".join(" to ".join(self._to_move[name]) for name in still)
        return StrikeOutcome(False, f"nothing was kept from coming through from {lively}")

    def take_back(self) -> None:
        for record in self._records:
            self._undo.heal(record)

    def _install(self, space: str, family: str, table: str, chains: str, knocks: dict[str, tuple[str, str]]) -> None:
        """Record the undo, then install a table. ``knocks`` names the counters in ``chains`` and what moves each."""
        self._records.append(self._undo.record(RemoveRules(space, family, table)))
        counters = "".join(f"counter {name} {{}}\n" for name in knocks)
        self._hosts.filter(space, f"table {family} {table} {{\n{counters}{chains}}}\n")
        self._tables.append((space, family, table))
        self._to_move |= knocks


class Partitioned(_Filtered):
    """A partition of the network. Each of ``groups`` is a set of trays that still reach each other.

    A silent partition drops frames on the switch; in a loud one, each tray's own host refuses connections.
    """

    def __init__(
        self, groups: Sequence[Sequence[str]], cut: CutShape, number: int, hosts: Hosts, undo: UndoLog
    ) -> None:
        super().__init__(hosts, undo)
        both = cut.shape != "one_way"
        for index, group in enumerate(groups):
            others = _others(group, cut.shape, hosts)
            if cut.loud:
                for name in group:
                    self._refuse(f"strike{number}", name, others, both=both)
            else:
                self._drop(f"strike{number}_{index}", group, others, both=both)

    def _drop(self, table: str, group: Sequence[str], others: Sequence[str], *, both: bool) -> None:
        inside, outside = _quoted(group), _quoted(others)
        knocks = {f"{table}_out": (group[0], others[0])}
        rules = f"iifname {{ {inside} }} oifname {{ {outside} }} counter name {table}_out drop\n"
        if both:
            knocks[f"{table}_in"] = (others[0], group[0])
            rules += f"iifname {{ {outside} }} oifname {{ {inside} }} counter name {table}_in drop\n"
        chain = f"chain forward {{ type filter hook forward priority 0; policy accept;\n{rules}}}\n"
        self._install(self._hosts.switch, "bridge", table, chain, knocks)

    def _refuse(self, table: str, name: str, others: Sequence[str], *, both: bool) -> None:
        there = ", ".join(self._hosts[other].address for other in others)
        counter = f"{table}_{self._hosts.trays.index(name)}"
        knocks, chains = {f"{counter}_out": (name, others[0])}, ""
        for hook, end in (("output", "daddr"), ("input", "saddr"))[: 2 if both else 1]:
            way = f"{counter}_{'out' if hook == 'output' else 'in'}"
            chains += (
                f"chain {hook} {{ type filter hook {hook} priority 0; policy accept;\n"
                f"tcp flags & rst == rst accept\n"  # the packet by which a connection is refused
                f"ip {end} {{ {there} }} meta l4proto tcp counter name {way} reject with tcp reset\n"
                f"ip {end} {{ {there} }} drop\n}}\n"
            )
        if both:
            knocks[f"{counter}_in"] = (others[0], name)
        self._install(self._hosts.named(name), "inet", table, chains, knocks)


class Lossy(_Filtered):
    """On each link between a tray and the coordinator's host, packets are dropped at random in both directions.

    ``lost`` is the share of packets that is dropped.
    """

    def __init__(self, trays: Iterable[str], lost: float, number: int, hosts: Hosts, undo: UndoLog) -> None:
        super().__init__(hosts, undo)
        table, rules, knocks = f"strike{number}", "", {}
        for index, tray in enumerate(trays):
            for way, (of, at) in {"out": (tray, HEAD), "in": (HEAD, tray)}.items():
                knocks[f"{table}_{index}_{way}"] = (of, at)
                share = f"numgen random mod 1000 < {round(lost * 1000)}"
                rules += f'iifname "{of}" oifname "{at}" {share} counter name {table}_{index}_{way} drop\n'
        chain = f"chain forward {{ type filter hook forward priority 0; policy accept;\n{rules}}}\n"
        self._install(self._hosts.switch, "bridge", table, chain, knocks)


def _others(group: Sequence[str], shape: str, hosts: Hosts) -> list[str]:
    """Return the hosts that the group no longer reaches. Raises `Missed` if it has no peers to be cut off from."""
    peers = [tray for tray in hosts.trays if tray not in group]
    if shape == "from_peers" and not peers:
        raise Missed(f"{', '.join(group)} have no peers")
    return {"from_coordinator": [HEAD], "from_peers": peers}.get(shape, [HEAD, *peers])


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
