"""The communicator of a large group, whose connections are built when they are first used in a generation.

Building a group of the world's size takes seconds to tens of seconds in each generation, and thousands of sockets for
each rank. The gate does not need it (`rackrun.worker.communicators.gate_tree`), and scripts with hierarchical
parallelism seldom use it.

* **Collectives** use the group's own communicator. All members come to a collective, so all come to its build.
* **Sends and receives** always use a communicator of the two ranks alone, even when the group's own exists: neither of
the two ranks would know whether it exists on the other.

A call returns at once, whatever has to be built for it (`rackrun.worker.communicators.deferred_collective`), so a send
may be called before a collective, and the receive after it. Calls on one communicator begin in their order. A batch
begins when the communicators of all its peers exist, pair by pair in the order of the pairs' numbers. This order is the
same on all ranks, so pairs never wait for each other in a circle.

A build cannot be interrupted, only abandoned: each has a thread, which `break_` leaves alone. One that fails makes all
calls fail.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from rackrun.errors import StepError, UsageError
from rackrun.worker.communicators.communicator import Communicator, PointToPoint
from rackrun.worker.communicators.deferred_collective import DeferredWork
from rackrun.worker.device.device_queue import DeviceQueue

__all__ = ["EAGER_RANKS", "OnDemand", "eager_ranks"]

EAGER_RANKS = 128
"""The largest group that is built at once. Up to this many ranks one root builds an NCCL communicator in 0.6 to 1.2 s,
and docs/scale.md advises groups of no more."""
_VARIABLE = "RACKRUN_EAGER_RANKS"


def eager_ranks() -> int:
    """Return `EAGER_RANKS` or the value from the environment, which must be the same on all ranks. Raises `UsageError`
    for an invalid value."""
    text = os.environ.get(_VARIABLE, "")
    if not text:
        return EAGER_RANKS
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{_VARIABLE}={text} is no number of ranks.", remedy="give one from 1, the same on all hosts.")
    return int(text)


class _Part:
    """One of the communicators: the group's own, or that of a pair of ranks."""

    def __init__(self) -> None:
        self.communicator: Communicator | None = None
        """None while it is being built."""
        self.calls: deque[_Call] = deque()
        """Calls that have not begun."""


class _Call:
    def __init__(self, parts: Sequence[_Part], work: DeferredWork) -> None:
        self.parts, self.work = parts, work

    def may_begin(self) -> bool:
        """Whether all connections that it needs are built, and it is the next call on each."""
        return all(part.communicator is not None and part.calls[0] is self for part in self.parts)


class OnDemand:
    """A `Communicator` of ``size`` ranks that builds its parts at their first use."""

    batches = True

    def __init__(
        self,
        build: Callable[[str, int, int], Communicator],
        close: Callable[[], None],
        rank: int,
        size: int,
        queue: DeviceQueue,
    ) -> None:
        """``build(name, rank, size)``: returns a communicator when all ranks have called it with this name; raises
        `RuntimeError` if that fails, and soon after ``close()`` was called."""
        self._build, self._close, self._rank, self._size, self._queue = build, close, rank, size, queue
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        """Held by the thread that begins calls. A break does not wait for it, because that thread may be inside a
        call."""
        self._parts: dict[str, _Part] = {}
        self._error: Exception | None = None

    def call(self, name: str, *args: Any, on_host: bool = False) -> Any:
        if name in ("send", "recv"):
            tensors, peer, tag = args
            pair = self._pair(peer)
            return self._start(
                [pair],
                lambda built: [built.call(name, tensors, _other(self._rank, peer), tag, on_host=on_host)],
                has_future=False,
            )
        if name == "recv_anysource":
            raise StepError(
                f"a receive from any source was called in a group of {self._size} ranks, where each pair of ranks has its own connection.",
                remedy=f"name the source; or make a group of no more than {eager_ranks()} ranks for it.",
            )
        return self._start(
            [("whole", self._rank, self._size)],
            lambda whole: [whole.call(name, *args, on_host=on_host)],
            has_future=on_host or self._queue.is_host,
            options=args[-1],
        )

    def batch(self, operations: Sequence[PointToPoint]) -> Any:
        by_peer: dict[int, list[PointToPoint]] = {}
        for name, tensor, peer, tag in operations:
            by_peer.setdefault(peer, []).append((name, tensor, _other(self._rank, peer), tag))
        peers = sorted(by_peer, key=lambda peer: (min(self._rank, peer), max(self._rank, peer)))

        def call(*pairs: Communicator) -> list[dist.Work]:
            return [work for peer, pair in zip(peers, pairs, strict=True) for work in _together(pair, by_peer[peer])]

        return self._start([self._pair(peer) for peer in peers], call, has_future=False, alone=False)

    def is_over(self, work: dist.Work) -> bool:
        return self._error is None and work.is_completed()

    def lost_a_peer(self) -> bool:
        """Whether a part that was built has lost a peer: everything received came over those."""
        return any(communicator.lost_a_peer() for communicator in self._built())

    def break_(self) -> None:
        self._fail(RuntimeError("the communicator was broken"))

    def drop(self) -> None:
        self.break_()
        for communicator in self._built():
            communicator.drop()

    def _pair(self, peer: int) -> tuple[str, int, int]:
        low, high = min(self._rank, peer), max(self._rank, peer)
        return f"pair/{low}-{high}", int(self._rank == high), 2

    def _start(
        self,
        wanted: Sequence[tuple[str, int, int]],
        call: Callable[..., list[dist.Work]],
        *,
        has_future: bool,
        options: Any = None,
        alone: bool = True,
    ) -> Any:
        """Start a call on the communicators ``wanted``, now or when they are built.

        ``options``: of a collective. A synchronous collective is in its caller's stream, so one that is deferred is
        made asynchronous. ``alone``: ``call`` returns one work.
        """
        with self._lock:
            if self._error is not None:
                raise RuntimeError(str(self._error))
            parts = [self._part(*one) for one in wanted]
            built = [part.communicator for part in parts if part.communicator is not None]
            if len(built) < len(parts) or any(part.calls for part in parts):

                def later() -> list[dist.Work]:
                    if hasattr(options, "asyncOp"):
                        options.asyncOp = True
                    return call(*[part.communicator for part in parts])

                work = DeferredWork(later, self._queue.place(), has_future=has_future)
                waiting = _Call(parts, work)
                for part in parts:
                    part.calls.append(waiting)
                return work
        works = call(*built)
        if alone:
            return works[0]
        done = DeferredWork(lambda: works, self._queue.place(), has_future=False)
        done.begin()
        done.wake_waiters()
        return done

    def _part(self, name: str, rank: int, size: int) -> _Part:
        part = self._parts.get(name)
        if part is None:
            part = self._parts[name] = _Part()
            threading.Thread(
                target=self._build_part, args=[part, name, rank, size], name=f"rackrun-build-{name}", daemon=True
            ).start()
        return part

    def _build_part(self, part: _Part, name: str, rank: int, size: int) -> None:
        try:
            self._queue.use()
            communicator = self._build(name, rank, size)
        except Exception as error:  # noqa: BLE001 - whoever waits raises it
            self._fail(RuntimeError(f"{name} could not be built: {error}"))
            return
        with self._lock:
            part.communicator = communicator
            overtaken = self._error is not None
        if overtaken:
            communicator.break_()
        self._begin()

    def _begin(self) -> None:
        """Begin all calls whose communicators exist and that are first in line on each."""
        begun = []
        with self._turn:
            while (call := self._next()) is not None:
                call.work.begin()
                begun.append(call.work)
                with self._lock:
                    for part in call.parts:
                        if part.calls:  # otherwise a break has removed them
                            part.calls.popleft()
                call.work.wake_waiters()
        for work in begun:
            work.complete_future()

    def _next(self) -> _Call | None:
        with self._lock:
            heads = (part.calls[0] for part in self._parts.values() if part.calls)
            return next((call for call in heads if call.may_begin()), None)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._error = self._error or error
            calls = {call: None for part in self._parts.values() for call in part.calls}
            for part in self._parts.values():
                part.calls.clear()
        self._close()
        for communicator in self._built():
            communicator.break_()
        for call in calls:
            call.work.fail(error)
        if futures := [call.work for call in calls]:
            threading.Thread(target=partial(_tell, futures), name="rackrun-tell", daemon=True).start()

    def _built(self) -> list[Communicator]:
        with self._lock:
            return [part.communicator for part in self._parts.values() if part.communicator is not None]


def _other(rank: int, peer: int) -> int:
    """Return the rank of ``peer`` in its pair with ``rank``."""
    return int(peer > rank)


def _together(pair: Communicator, operations: Sequence[PointToPoint]) -> list[dist.Work]:
    if pair.batches:
        return [pair.batch(operations)]
    return [pair.call(name, [tensor], peer, tag) for name, tensor, peer, tag in operations]


def _tell(works: Sequence[DeferredWork]) -> None:
    for work in works:
        work.complete_future()
