"""Reports in which host collective the main thread is blocked, and how many this rank has called in each group: proof
of a deadlock.

Only what is certain is written to the heartbeat page (`rackrun.core.faults.deadlock` says why). The main thread must
wait, in a step or a phase, in a collective that cannot end before all members of its group have called it, and nobody
but the main thread may be able to call another one. So nothing is written about a send, a receive or a broadcast, about
a wait in torch's own code (DDP's for its buckets), about a wait on a device, in a phase while threads of the script
run, or while a future exists whose callbacks may call collectives.

Nothing is written in the first quarter of a second, so a short wait costs nothing.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from rackrun.worker.communicators.gate_tree import GATE_MAX, GATE_SUM, WithGateTree
from rackrun.worker.membership.decisions.gate import elements

if TYPE_CHECKING:
    from rackrun.link.heartbeat_page import HeartbeatPage
    from rackrun.worker.membership.elastic_group import ElasticGroup

__all__ = ["BlockedCollective", "BlockedCall"]

_POINT_TO_POINT = frozenset({"send", "recv", "recv_anysource", "batch"})
"""Operations that are not in the order of the group's collectives."""
_TREE = frozenset({GATE_SUM, GATE_MAX})
"""Operations of the gate tree, which have an order of their own."""
_OF_ALL = frozenset({"allreduce", "allreduce_coalesced", "allgather", "allgather_coalesced", "_allgather_base"}) | _TREE
"""Collectives in which each rank's result depends on the input of every rank."""


class BlockedCall(NamedTuple):
    """The ``number``-th collective that this rank has called in ``group`` in this generation. ``needs_all``: whether it
    ends only when all members have called it."""

    group: str
    number: int
    needs_all: bool


class BlockedCollective:
    """Counts this rank's collectives per group, and writes to the heartbeat page in which one its main thread is
    blocked."""

    def __init__(self, page: HeartbeatPage) -> None:
        self._page = page
        self._called: dict[str, int] = {}
        self._futures: set[object] = set()
        """Works with futures whose callbacks have not returned: callbacks may call collectives in other threads."""
        self._elsewhere = False
        """Whether a thread other than the main thread has called a collective in this generation."""
        self._told = False

    def new_generation(self) -> None:
        """Restart all counts."""
        self._called.clear()
        self._futures.clear()
        self._elsewhere = False

    def count(self, group: ElasticGroup, name: str, result: Any) -> BlockedCall | None:
        """Count a collective that has begun without an error, and return its place; None for point-to-point
        operations."""
        if name in _POINT_TO_POINT:
            return None
        if threading.get_ident() != threading.main_thread().ident:
            self._elsewhere = True
        key = _tree_of(group.key) if name in _TREE else group.key
        number = self._called[key] = self._called.get(key, 0) + 1
        needs_all = name == "barrier" or (name in _OF_ALL and elements(result) > 0)
        return BlockedCall(key, number, needs_all)

    def future_given(self, work: object) -> None:
        """Record that a future of ``work`` exists."""
        self._futures.add(work)

    def future_over(self, work: object) -> None:
        """Record that the callbacks of ``work``'s future have returned."""
        self._futures.discard(work)

    def report(self, call: BlockedCall | None, generation: int, groups: Iterable[ElasticGroup]) -> None:
        """Write to the heartbeat page that the main thread is blocked in ``call``, a collective of ``generation`` that
        cannot end before all members have called it, and how many collectives this rank has called in each of
        ``groups``.

        Nothing is written if ``call`` is None or may end without all members, or if another thread or a future's
        callback may still call a collective.
        """
        if self._told or call is None or not call.needs_all or self._elsewhere or self._futures:
            return
        keys = [group.key for group in groups if group.size() > 1]
        keys += [_tree_of(group.key) for group in groups if isinstance(group.communicator, WithGateTree)]
        called = [(_number_of(key), self._called.get(key, 0)) for key in keys]
        self._told = True
        self._page.tell_blocked(generation, _number_of(call.group), call.number, called)

    def withdraw(self) -> None:
        """Withdraw the report: the main thread is not blocked any more."""
        if self._told:
            self._told = False
            self._page.tell_not_blocked()


def _tree_of(key: str) -> str:
    return f"{key} tree"


def _number_of(key: str) -> int:
    """Return a number below 2^53 for a group's key, the same on all hosts. The key names all members of the group."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 11
