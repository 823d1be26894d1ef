"""A double of NCCL's contract, over gloo and the host's memory: what a GPU's collectives do that the host's do not.

- A synchronous call gives None. Any call only enqueues; ``wait()`` makes the stream wait, and passes before there is a result.
- The collectives of one communicator run one after another, in the order of their calls, each behind what its stream waits for.
- A break raises nowhere: what was in flight ends with garbage (NaN, -1), and every wait passes.
- There is no receive from any source.
- What is on the host goes over gloo: the tensors of torch's own collectives of objects.

A `Stream` stands in for the device's. Torch's operations on a tensor that a collective still reads or writes wait for it, as kernels behind it
in a stream do; what goes past torch (numpy, a raw address) reads what is there, as the host would on a GPU that had not come so far. "late": each
collective takes a millisecond and more, and one that has lost a peer ends ten seconds later, or when it is broken. "stuck": it ends only then.
"early": it ends at once, with garbage, before this rank hears of anything. So it is behind a peer that was broken earlier than this rank.

The host computes what a device would, so the time at which the device passes a place in its stream is when the host was there, or later: when the
last collective is over that the stream waits for in front of it.

What the callback of a future enqueues stands in a stream of its own, for which the current one waits at the end of a backward pass. There is none
beside: it is computed then, and not where the host comes to it, or the host would wait for a collective in the middle of the pass.

What it cannot tell: other streams beside the current one, whether a kernel ends when it is aborted, and any time.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from rackrun.worker.communicators.communicator import PointToPoint
from rackrun.worker.communicators.gloo import GlooCommunicator
from rackrun.worker.membership import communicator_builder, elastic_group
from rackrun.worker.membership import worker_membership as world
from rackrun.worker.restore import live_restore
from rackrun.worker.tensors import tensor_bytes

__all__ = ["EARLY", "MODES", "Double", "LateWork", "Queue", "Stream", "install", "stream_of"]

MODES = ("late", "stuck")
EARLY = "early"
"""A mode, too; few tests take that long a third time."""
_LATE_S = 0.001
_NOTICED_S = 10.0
_LEAVES_S = 0.02
"""A kernel sees now and then that it is to leave."""
_LOOK = timedelta(milliseconds=250)


class Stream:
    """Of this process: which memory is still being read or written."""

    def __init__(self) -> None:
        self.read_by_host = False
        """torch's own code copies to the host before it reads, which is no copy where the memory is the host's: waits are real meanwhile."""
        self.captures = False
        """A graph."""
        self._lock = threading.Lock()
        self._pending: dict[int, list[Enqueued]] = {}
        self._hung: list[torch.Tensor] = []
        self._awaited: list[Enqueued] = []
        """What the stream waits for, and may not have come past."""
        self._elsewhere = threading.local()
        """A thread that enqueues behind an earlier place than the present one."""

    def enqueue(self, work: Enqueued) -> None:
        with self._lock:
            for address in work.addresses:
                self._pending.setdefault(address, []).append(work)

    def over(self, work: Enqueued) -> None:
        with self._lock:
            for address in work.addresses:
                held = self._pending.get(address, [])
                if work in held:
                    held.remove(work)
                if not held:
                    self._pending.pop(address, None)
        work.ends()

    def waits_for(self, work: Enqueued) -> None:
        """What is enqueued from now on."""
        with self._lock:
            self._awaited = [one for one in (*self._awaited, work) if not one.over.is_set()]

    def record_event(self) -> Reached:
        if (place := getattr(self._elsewhere, "place", None)) is not None:
            return cast("Reached", place)
        with self._lock:
            return Reached(time.monotonic(), tuple(self._awaited))

    def place(self) -> contextlib.AbstractContextManager[None]:
        return self._behind(self.record_event())

    @contextlib.contextmanager
    def _behind(self, place: Reached) -> Iterator[None]:
        self._elsewhere.place = place
        try:
            yield
        finally:
            self._elsewhere.place = None

    def synchronise(self) -> None:
        with self._lock:
            works = {id(work): work for held in self._pending.values() for work in held}
        for work in works.values():
            work.over.wait()

    def is_empty(self) -> bool:
        """Nothing is in flight."""
        return not self._pending

    def hang(self) -> None:
        """Enqueue a kernel that never ends, and writes to memory of its own."""
        self._hung.append(torch.zeros(1))
        kernel = Enqueued(self._hung)
        self.enqueue(kernel)
        self.waits_for(kernel)

    def before(self, tensor: torch.Tensor) -> None:
        """An operation on ``tensor`` stands behind what was enqueued."""
        if not self._pending:
            return
        with self._lock:
            works = [work for address in _addresses([tensor]) for work in self._pending.get(address, ())]
        for work in works:
            work.over.wait()

    def mark(self) -> Callable[[], bool]:
        with self._lock:
            works = {id(work): work for held in self._pending.values() for work in held}
        return lambda: all(work.over.is_set() for work in works.values())


class Enqueued:
    """What ``touched`` waits for."""

    def __init__(self, touched: list[torch.Tensor]) -> None:
        self.addresses, self.over, self.over_s = _addresses(touched), threading.Event(), 0.0

    def ends(self) -> None:
        self.over_s = time.monotonic()
        self.over.set()


class Reached:
    """A place in a stream, that the host came to at ``at_s``, behind ``works``."""

    def __init__(self, at_s: float, works: tuple[Enqueued, ...]) -> None:
        self._at_s, self._works = at_s, works

    def passed(self) -> bool:
        return all(work.over.is_set() for work in self._works)

    def since(self, earlier: Reached) -> float:
        assert self.passed(), "asked before the device was there"
        return self._passed_s() - earlier._passed_s()

    def _passed_s(self) -> float:
        return max([self._at_s, *(work.over_s for work in self._works)])


class InStream(TorchDispatchMode):
    """What this thread does with tensors, it enqueues."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stream = stream

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return self._of_parts(func, args, kwargs or {})
        if any(is_traceable_wrapper_subclass_type(one) for one in types):
            return NotImplemented  # its own operations on its parts come here by themselves
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self._stream.before(leaf)
        return func(*args, **(kwargs or {}))

    def _of_parts(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Torch goes on with a DTensor's part, and with its collectives, past this mode: they are waited for, as the stream would."""
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self._stream.before(leaf._local_tensor if isinstance(leaf, DTensor) else leaf)
        before, self._stream.read_by_host = self._stream.read_by_host, True
        try:
            return func(*args, **kwargs)
        finally:
            self._stream.read_by_host = before


class LateWork(dist.Work):
    def __init__(self, stream: Stream, outputs: list[torch.Tensor], touched: list[torch.Tensor]) -> None:
        super().__init__()
        self._stream = stream
        self.outputs, self.enqueued = outputs, Enqueued(touched)
        self.over = self.enqueued.over
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(outputs)  # NCCL's is complete once it is enqueued

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._stream.waits_for(self.enqueued)
        if timeout is not None or self._stream.read_by_host:
            self.over.wait(None if timeout is None else timeout.total_seconds())
        return True

    def is_completed(self) -> bool:
        return self.over.is_set()

    def is_success(self) -> bool:
        return self.over.is_set()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class Played(torch.futures.Future[Any]):
    """What ``callback`` makes of ``future``, at the end of the backward pass in hand, or where the host asks for it."""

    playing = threading.local()
    """In a thread that computes one: what it asks for in turn has no later end to be computed at."""

    def __init__(self, callback: Callable[[Any], Any], future: Any) -> None:
        super().__init__()
        self._callback: Callable[[Any], Any] | None = callback
        self._of = future
        torch.autograd.Variable._execution_engine.queue_callback(self._play)  # in front of DDP's, which waits for it

    def _play(self) -> None:
        callback, self._callback = self._callback, None
        if callback is None:
            return
        outer, self.playing.now = getattr(self.playing, "now", False), True
        try:
            result = callback(self._of)
        except Exception as error:  # noqa: BLE001 - as torch does
            self.set_exception(error)
        else:
            self.set_result(result)
        finally:
            self.playing.now = outer

    def wait(self) -> Any:
        self._play()
        return super().wait()

    def value(self) -> Any:
        self._play()
        return super().value()


class Double:
    """One rank's communicator, over ``inner``."""

    def __init__(self, inner: Any, stream: Stream, mode: str) -> None:
        self._inner, self._stream = inner, stream
        self._notices_s = {"late": _NOTICED_S, "stuck": None, EARLY: 0.0}[mode]
        self._aborted = threading.Event()
        self._calls: queue.SimpleQueue[tuple[list[tuple[str, tuple[Any, ...]]], LateWork, Reached] | None]
        self._calls = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="nccl-double", daemon=True)
        self._thread.start()

    def call(self, name: str, *args: Any) -> LateWork | None:
        if name == "recv_anysource":
            raise NotImplementedError("Backend nccl does not support recvAnysource")
        given = [one for one in args if isinstance(one, (torch.Tensor, list, tuple))]
        outputs = [] if name == "send" else [one for one in tree_leaves(given[:1]) if isinstance(one, torch.Tensor)]
        work = LateWork(self._stream, outputs, [one for one in tree_leaves(given) if isinstance(one, torch.Tensor)])
        for tensor in tree_leaves(given):
            if isinstance(tensor, torch.Tensor):
                self._stream.before(tensor)
        self._stream.enqueue(work.enqueued)
        self._calls.put(([(name, args)], work, self._stream.record_event()))
        if getattr(args[-1], "asyncOp", True):
            return work
        self._stream.waits_for(work.enqueued)
        return None

    def batch(self, operations: Sequence[PointToPoint]) -> LateWork:
        """All start before any is waited for."""
        received = [tensor for name, tensor, _, _ in operations if name == "recv"]
        work = LateWork(self._stream, received, [tensor for _, tensor, _, _ in operations])
        for _, tensor, _, _ in operations:
            self._stream.before(tensor)
        self._stream.enqueue(work.enqueued)
        together = [(name, ([tensor], peer, tag)) for name, tensor, peer, tag in operations]
        self._calls.put((together, work, self._stream.record_event()))
        return work

    @property
    def aborted(self) -> bool:
        return self._aborted.is_set()

    def abort(self) -> None:
        self._aborted.set()

    def close(self) -> None:
        """Once what was called is over."""
        self._calls.put(None)
        self._thread.join()

    @torch.no_grad()  # a collective is no operation of autograd's: it may write to a parameter
    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            together, work, reached = call
            try:
                while not (reached.passed() or self._aborted.is_set()):
                    self._aborted.wait(_LATE_S)
                if self._aborted.is_set():
                    raise RuntimeError("aborted")
                time.sleep(_LATE_S)
                for name, args, started in [(name, args, getattr(self._inner, name)(*args)) for name, args in together]:
                    if name in ("send", "recv"):
                        _wait_point_to_point(started, args, self._aborted)
                    else:
                        _wait(started, self._aborted)
            except RuntimeError:
                self._aborted.wait(self._notices_s)
                time.sleep(_LEAVES_S)
                with torch.no_grad():
                    for tensor in work.outputs:
                        tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(-1)
            self._stream.over(work.enqueued)


class DoubleCommunicator:
    """As `rackrun.worker.communicators.nccl`."""

    batches = True

    def __init__(self, host: GlooCommunicator, device: GlooCommunicator, stream: Stream, mode: str) -> None:
        self._on_host, self._on_device = host, device
        host.watch()
        self.host, self.inner = host.inner, Double(device.inner, stream, mode)

    def call(self, name: str, *args: Any, on_host: bool = False) -> Any:
        return getattr(self.host, name)(*args) if on_host else self._whole().call(name, *args)

    def batch(self, operations: Sequence[PointToPoint]) -> Any:
        return self._whole().batch(operations)

    def _whole(self) -> Double:
        if self.inner.aborted:
            raise RuntimeError("the communicator was broken")
        return self.inner

    def is_over(self, work: dist.Work) -> bool:
        return not self.inner.aborted and work.is_completed()

    def lost_a_peer(self) -> bool:
        return self._on_host.lost_a_peer()

    def break_(self) -> None:
        self._on_host.break_()
        self.inner.abort()
        self._on_device.break_()

    def drop(self) -> None:
        """Nothing to wait for."""


class Queue:
    is_host = False
    name = "double of a GPU"

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.mark, self.record_event, self.synchronise = stream.mark, stream.record_event, stream.synchronise
        self.place = stream.place

    def stream(self) -> int:
        return 0

    def is_capturing(self) -> bool:
        return self._stream.captures

    def use(self) -> None:
        """There is one device."""


def stream_of(world: Any) -> Stream:
    """For scripts: that of this process's `WorkerMembership`."""
    stream: Stream = world.queue._stream
    return stream


def install(mode: str) -> TorchDispatchMode:
    """In this process, before it makes its first group. What its main thread does is to run inside of what this returns."""
    stream = Stream()

    def build(device: torch.device, store: dist.Store, rank: int, size: int, timeout: timedelta) -> DoubleCommunicator:
        del device
        host = GlooCommunicator(dist.PrefixStore("host", store), rank, size, timeout)
        return DoubleCommunicator(
            host, GlooCommunicator(dist.PrefixStore("device", store), rank, size, timeout), stream, mode
        )

    attempt = world.WorkerMembership.attempt

    def attempt_in_stream(self: world.WorkerMembership, plan: Any, transfer: Callable[[], Any]) -> Any:
        def in_stream() -> Any:
            with InStream(stream):
                return transfer()

        return attempt(self, plan, in_stream)

    @contextlib.contextmanager
    def unreadable(tensors: Any) -> Iterator[None]:
        del tensors
        yield None

    verify = dist._verify_params_across_processes

    def verify_on_host(*args: Any) -> Any:
        stream.read_by_host = True
        try:
            return verify(*args)
        finally:
            stream.read_by_host = False

    dist._verify_params_across_processes = verify_on_host  # type: ignore[assignment]
    _have_objects_on_host()
    as_list = torch.Tensor.tolist

    def list_in_stream(self: torch.Tensor) -> Any:
        """It goes past the dispatcher where the memory is the host's; on a GPU it waits for the stream."""
        stream.before(self)
        return as_list(self)

    torch.Tensor.tolist = list_in_stream  # type: ignore[method-assign,assignment]
    then = torch.futures.Future.then

    def then_at_the_end(self: Any, callback: Callable[[Any], Any]) -> Any:
        if torch._C._current_graph_task_id() == -1 or getattr(Played.playing, "now", False):
            return then(self, callback)
        return Played(callback, self)

    torch.futures.Future.then = then_at_the_end  # type: ignore[method-assign]
    communicator_builder.build_communicator = build
    world.queue_of = lambda _: Queue(stream)  # type: ignore[attr-defined,assignment,return-value]  # its import, replaced
    world.WorkerMembership.attempt = attempt_in_stream  # type: ignore[method-assign]
    live_restore.readable = unreadable  # type: ignore[attr-defined]  # the same
    tensor_bytes._of_host = tensor_bytes._of_device
    return InStream(stream)


def _have_objects_on_host() -> None:
    """Torch puts objects into tensors of the host, where a group has a backend for those."""
    on_host = threading.local()
    is_of_device = elastic_group.ElasticGroup._is_of_device

    def is_not_of_host(self: elastic_group.ElasticGroup, first: torch.Tensor | None) -> bool:
        return not getattr(on_host, "now", False) and is_of_device(self, first)

    def of_objects(collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def called(*args: Any, **kwargs: Any) -> Any:
            on_host.now = True
            try:
                return collective(*args, **kwargs)
            finally:
                on_host.now = False

        return called

    elastic_group.ElasticGroup._is_of_device = is_not_of_host  # type: ignore[method-assign]
    for name in ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"):
        wrapped = of_objects(getattr(dist, name))
        for module in (dist, distributed_c10d):
            setattr(module, name, wrapped)


def _addresses(tensors: Sequence[torch.Tensor]) -> set[int]:
    found = set()
    for tensor in tensors:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # it has no memory
            if address := tensor.untyped_storage().data_ptr():
                found.add(address)
    return found


def _wait_point_to_point(work: dist.Work, used: tuple[Any, ...], aborted: threading.Event) -> None:
    """gloo loses wake-ups here too, and a limit would close all of its connections: a thread waits, which can be left. It keeps the tensors ``used``."""
    over, errors = threading.Event(), list[RuntimeError]()

    def wait(*_used: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            errors.append(error)
        finally:
            over.set()

    threading.Thread(target=wait, args=used, name="nccl-double-wait", daemon=True).start()
    while not over.wait(_LOOK.total_seconds()):
        if aborted.is_set():
            raise RuntimeError("aborted")
    if errors:
        raise errors[0]


def _wait(work: dist.Work, aborted: threading.Event) -> None:
    """gloo can lose the wake-up of a collective that is broken, and would wait for its timeout: see `rackrun.worker.membership.collective_work.GuardedWork`."""
    while True:
        ended = work.is_completed()  # asked first: it may end just after a look at it has timed out
        try:
            work.wait(_LOOK)
            return
        except RuntimeError:
            if ended or aborted.is_set():
                raise
