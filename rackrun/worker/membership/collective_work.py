"""The works that collectives of an elastic group return: one that is complete, one in flight, or several as one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rackrun.errors import CollectiveBroken
from rackrun.worker.communicators.deferred_collective import DeferredWork
from rackrun.worker.torch_compat.not_compiled import not_compiled

if TYPE_CHECKING:
    from rackrun.worker.membership.collective_progress import Entered
    from rackrun.worker.membership.worker_membership import WorkerMembership

__all__ = ["CombinedWork", "CompletedWork", "GuardedWork", "is_misuse"]

_LOOK = timedelta(milliseconds=250)


class CompletedWork(dist.Work):
    """The work of a collective that is complete when it is created, with ``result``."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result
        self._future: torch.futures.Future[Any] | None = None
        """Made when it is asked for, because torch pickles the result to find the tensors in it; on a device at once,
        because it holds the streams' places."""
        if _devices(result):
            self.get_future()

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        if self._future is None:
            self._future = torch.futures.Future(devices=_devices(self._result))
            self._future.set_result(self._result)
        return self._future

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> Any:
        return self._result


class GuardedWork(dist.Work):
    """A collective in flight. If it fails, its group is marked broken and the loopback's values replace its result.

    gloo can lose the wake-up of a collective whose sockets are shut down, and then waits for its timeout. So nobody
    waits for gloo alone: `wait` checks at intervals whether the collective was abandoned, and a future is this class's
    own, which `abandon` completes.

    On a device the stream waits, and the host goes on. A broken collective leaves garbage there that looks complete. In
    a step only the gate draws a conclusion, and the gate checks for breaks. In a phase and outside of units the script
    itself may draw one, so the host waits there, too.
    """

    def __init__(
        self,
        world: WorkerMembership,
        generation: int,
        work: dist.Work,
        result: Any,
        loopback: Callable[[], None],
        then: Callable[[], None] | None = None,
        *,
        entered: Entered,
        garbage: Any = (),
    ) -> None:
        """``result``: what the collective writes, tensors nested in lists. ``loopback``: writes the values that replace
        a broken result. ``then``: computes ``result`` from what ``work`` wrote. ``garbage``: the part of the result
        that the loopback does not write anew."""
        super().__init__()
        self._entered, self._on_device, self._garbage = entered, entered.reached is not None, garbage
        self._world, self._generation, self._work = world, generation, work
        self._result, self._loopback, self._then = result, loopback, then
        self._future: torch.futures.Future[Any] | None = None
        self._settling = threading.Lock()
        self._over = False

    @not_compiled
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the collective; a broken one leaves the loopback's result. Raises `RuntimeError` for a misuse."""
        del timeout
        if self._on_device:
            self._wait_on_device()
        else:
            self._wait_on_host()
        self._world.leave_phase()
        return True

    def _wait_on_host(self) -> None:
        began = time.monotonic()
        if self._future is not None:
            self._future.wait()
        try:
            while not self._over:
                ended = self._work.is_completed()  # read first: it may end just after a wait for it has timed out
                try:
                    self._work.wait(_LOOK)
                    self._settle(None)
                except RuntimeError as error:
                    if ended:
                        self._raise_misuse(error)
                        self._settle(error)
                    elif self._world.may_abandon(self._generation):
                        self.abandon()
                    else:
                        self._world.report_blocked(self._entered, self._generation)
        finally:
            self._world.blocked.withdraw()
        self._world.own_time.add_host_wait(time.monotonic() - began)

    def _wait_on_device(self) -> None:
        """Make the current stream wait, and the host too where the script reads the result.

        NCCL's wait blocks the stream, not the host; with a time limit it would block the host, and abort its
        communicator. After an abort nothing waits any more.
        """
        error: Exception | None = None
        queue, after = self._world.queue, self._entered.passed
        if after is None or not isinstance(self._work, CompletedWork):
            before = queue.record_event()
            try:
                if self._future is not None:
                    self._future.wait()
                else:
                    self._work.wait()
            except RuntimeError as failed:
                self._raise_misuse(failed)
                error = failed
            after = queue.record_event()
            self._entered.waited(after)
            self._world.own_time.add_stream_wait(before, after)
        if self._world.result_is_final and not self._world.wait_for_event(after, self._generation):
            error = error or CollectiveBroken("left in the middle")
        self._settle(error)
        self._world.leave_setup()

    def _raise_misuse(self, error: RuntimeError) -> None:
        """Raise ``error`` if it is a misuse in a call that began only after it was made."""
        if isinstance(self._work, DeferredWork) and self._work.refused and is_misuse(error):
            raise error

    @not_compiled
    def get_future(self) -> torch.futures.Future[Any]:
        if self._future is None:
            if self._over:  # somebody has waited for it
                return CompletedWork(self._result).get_future()
            if self._on_device and self._world.result_is_final:
                self.wait()
                return CompletedWork(self._result).get_future()
            try:
                inner = self._work.get_future()
            except RuntimeError:  # gloo's point-to-point works have no future
                self.wait()
                return CompletedWork(self._result).get_future()
            self._future = torch.futures.Future(devices=_devices(self._result))
            self._world.inflight.add(self)
            self._world.blocked.future_given(self)
            self._world.own_time.future_given()
            inner.add_done_callback(self._inner_done)
        return self._future

    def abandon(self) -> None:
        """Go on without the collective. It may still write, but to memory that nobody reads any more."""
        self._settle(CollectiveBroken("left behind"))

    def _inner_done(self, inner: torch.futures.Future[Any]) -> None:
        try:
            inner.value()
        except RuntimeError as error:
            self._settle(error)
            return
        try:
            self._settle(None)
        except (
            RuntimeError
        ) as misuse:  # tensors that do not fit: nobody sees the error here, and waiters would wait for ever
            assert self._future is not None, "a callback without a future"
            self._future.set_exception(misuse)
            self._world.blocked.future_over(self)

    def _settle(self, error: Exception | None) -> None:
        """Conclude the collective once: with its result, or with the loopback's values after ``error``. Any thread."""
        with self._settling:
            if self._over:
                return
            if error is None and self._then is not None:
                self._then()
            self._over = True
        world = self._world
        if error is not None:
            world.collective_failed(self._generation, error, self._result)
            if self._on_device and world.result_is_final:
                _zero(self._garbage)  # the script may still read it where it cannot be left, such as inside autograd
            self._loopback()
        if self._generation == world.machine.generation and not self._on_device:
            world.progress.completed(self._entered)
        if self._future is not None:
            world.inflight.remove(self)
            world.own_time.future_completed()
            self._future.set_result(self._result)
            world.blocked.future_over(self)

    def is_completed(self) -> bool:
        return self._over or (self._entered.is_passed() if self._on_device else self._work.is_completed())

    def is_success(self) -> bool:
        """Return whether it is over, by a break too."""
        return self.is_completed()

    @not_compiled
    def result(self) -> Any:
        self.wait()
        return self._result


class CombinedWork(dist.Work):
    """Several collectives as one work."""

    def __init__(self, works: list[dist.Work], result: Any) -> None:
        super().__init__()
        self._works, self._result = works, result

    @not_compiled
    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002
        for work in self._works:
            work.wait()
        return True

    @not_compiled
    def get_future(self) -> torch.futures.Future[Any]:
        self.wait()
        return CompletedWork(self._result).get_future()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def is_misuse(error: RuntimeError) -> bool:
    """Whether ``error`` comes from wrong use of a collective, not from a lost peer.

    gloo checks a collective's arguments when it is called; a lost peer shows only later, in the transport. Errors of
    another type are no transport errors either: no memory on the device, a call that the backend does not have.
    """
    if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
        return True
    text = str(error)
    return ("ProcessGroupGloo::" in text or "ProcessGroupGloo.cpp" in text) and "gloo/transport" not in text


def _zero(result: Any) -> None:
    """Fill all tensors of a collective's result with zeros."""
    if isinstance(result, torch.Tensor):
        with torch.no_grad():
            result.zero_()
    elif isinstance(result, (list, tuple)):
        for one in result:
            _zero(one)


def _devices(result: Any) -> list[int | str | torch.device]:
    """Return the devices for a future of ``result``: torch needs them when it creates a future of GPU tensors."""
    while isinstance(result, (list, tuple)) and result:
        result = result[0]
    return [result.device] if isinstance(result, torch.Tensor) and result.device.type == "cuda" else []
