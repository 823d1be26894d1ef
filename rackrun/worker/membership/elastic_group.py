"""The elastic process group: one object for the whole run, whose communicator is replaced in each generation.

It is registered with torch as the backend ``rackrun``, and the *default* group is elastic. So everything that a script
does with ``torch.distributed``, DeviceMesh, DTensor, DDP or FSDP2 goes through this class.

While a group is not joined, and from the moment it is broken, every collective is a **loopback**, which computes as if
every peer held this rank's values. It completes at once, with values of a plausible size and range, so that no error
passes through autograd and no kernel reads uninitialised memory. The result of a broken collective never counts: the
step that used it is discarded at the gate.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed.tensor import DTensor

from rackrun.errors import StepError
from rackrun.worker.communicators.deferred_collective import DeferredWork
from rackrun.worker.communicators.gate_tree import WithGateTree, on_hosts
from rackrun.worker.membership.collective_work import CombinedWork, CompletedWork, GuardedWork, is_misuse
from rackrun.worker.torch_compat.compiled_places import CompiledPlaces
from rackrun.worker.torch_compat.not_compiled import not_compiled

if TYPE_CHECKING:
    from rackrun.worker.communicators.communicator import Communicator, PointToPoint
    from rackrun.worker.membership.worker_membership import WorkerMembership

__all__ = ["BACKEND", "ElasticGroup"]

BACKEND = "rackrun"
_IN_PLACE = ("allreduce", "allreduce_coalesced", "reduce")

Tensors = Sequence[torch.Tensor]

_COMPILED = CompiledPlaces()


class ElasticGroup(dist.ProcessGroup):
    """A process group. ``ranks``: the members' global ranks, in group order. ``group_rank``: this process's place among
    them."""

    def __init__(
        self, world: WorkerMembership, ranks: Sequence[int], group_rank: int, name: str, desc: str, key: str
    ) -> None:
        super().__init__(group_rank, len(ranks))  # type: ignore[call-arg]
        self.world = world
        self.ranks = tuple(ranks)
        self.key = key
        """A name that is the same on every member, unlike torch's group name; the keys in a generation's store begin
        with it."""
        self.communicator: Communicator | None = None
        self.group_rank = group_rank
        """This process's rank in the group. rackrun's own code reads this and ``ranks``; torch and scripts call `rank` and
        `size`, whose callers dynamo may trace."""
        self._asks_nobody = False
        self._name = name
        self._desc = desc
        self._coalesced: list[dist.Work] | None = None
        """Collectives called so far inside torch's coalescing manager; None outside of it."""

    # -- identity: torch reads it under several names
    def rank(self) -> int:
        """Return this process's rank in the group, which may change with the generation."""
        _COMPILED.read()
        return self.group_rank

    def size(self) -> int:
        """Return the number of ranks in the group."""
        _COMPILED.read()
        return len(self.ranks)

    getRank = rank  # noqa: N815
    getSize = size  # noqa: N815

    def name(self) -> str:
        return BACKEND

    getBackendName = name  # noqa: N815

    @property
    def _device_types(self) -> list[torch.device]:
        """Device types of the tensors that collectives accept. torch reads this to choose where objects travel, and
        before an asynchronous checkpoint."""
        host = torch.device("cpu")
        return [host] if self.world.device.type == "cpu" else [torch.device(self.world.device.type), host]

    def _get_backend(self, device: torch.device) -> Any:  # noqa: ARG002
        return self

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    setGroupName = _set_group_name  # noqa: N815

    @property
    def group_desc(self) -> str:
        return self._desc

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._desc

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def new_group(
        self, ranks: Sequence[int], timeout: timedelta | None = None, pg_options: Any = None, **names: Any
    ) -> Any:
        """Make a group; c10d delegates ``torch.distributed.new_group`` to this. Returns None on a rank that is not a
        member."""
        del timeout, pg_options
        return self.world.new_group(ranks, names.get("group_name") or "", names.get("group_desc") or "undefined")

    def become(self, ranks: Sequence[int], group_rank: int) -> None:
        """Change the group's ranks and this process's place among them, when a promoted spare takes another place."""
        if (tuple(ranks), group_rank) == (self.ranks, self.group_rank):
            return
        self.ranks = tuple(ranks)
        self.group_rank = group_rank
        # A DeviceMesh hands its coordinates to dynamo without asking the group.
        _COMPILED.changed(read=self.key != "world")

    @contextlib.contextmanager
    def asking_nobody(self) -> Iterator[None]:
        """Context manager in which every collective is a loopback, for exchanges whose values are the same on all
        members."""
        self._asks_nobody = True
        try:
            yield
        finally:
            self._asks_nobody = False

    def abort(self) -> None:
        """Do nothing: the world, not torch's clean-up, breaks and drops communicators."""

    def shutdown(self) -> None:
        """Do nothing (see `abort`)."""

    # -- called by torch.distributed._coalescing_manager(device=...) around collectives
    def _start_coalescing(self, device: torch.device) -> None:  # noqa: ARG002
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:  # noqa: ARG002
        """Return one work for all collectives since `_start_coalescing`. Each was called separately in its turn; the
        backend groups none."""
        works, self._coalesced = self._coalesced or [], None
        return CombinedWork(works, [])

    def leave_coalescing(self) -> None:
        """Reset the coalescing state. The unit that entered a coalescing manager is over, and may have been abandoned
        inside of it."""
        self._coalesced = None

    def _check_not_coalesced(self, tensors: Tensors) -> None:
        """Raise `StepError` for a send or receive of a device inside a coalescing manager: called one by one, two ranks
        that both send first would wait for each other."""
        if self._coalesced is not None and self.batches(tensors[0].device):
            raise StepError(
                "a send or a receive was called inside of torch.distributed._coalescing_manager, which groups collectives only here.",
                remedy="give them to torch.distributed.batch_isend_irecv.",
            )

    # -- collectives
    def _run(
        self,
        name: str,
        result: Any,
        loopback: Callable[[], None],
        *args: Any,
        then: Callable[[], None] | None = None,
        on_host: bool = False,
    ) -> dist.Work:
        first = _first_tensor(args)
        if isinstance(first, DTensor):
            raise StepError(
                f"a DTensor was given to a collective ({name}), which needs plain tensors (DistributedDataParallel over a tensor-parallel model, perhaps).",
                remedy="give it tensor.to_local(); for data parallelism beside tensor parallelism use fully_shard (FSDP2).",
            )
        return self._start(
            name,
            result,
            loopback,
            lambda communicator, on_host: communicator.call(name, *args, on_host=on_host),
            then,
            on_host=on_host or not self._is_of_device(first),
            synchronous=not getattr(args[-1], "asyncOp", True),
            garbage=self._garbage(name, result, args),
        )

    def _start(
        self,
        name: str,
        result: Any,
        loopback: Callable[[], None],
        call: Callable[[Communicator, bool], dist.Work | None],
        then: Callable[[], None] | None = None,
        *,
        on_host: bool = False,
        synchronous: bool = False,
        garbage: Any = (),
    ) -> dist.Work:
        """Start a collective, or run its loopback. ``call(communicator, on_host)`` starts it; ``on_host`` selects the
        hosts' half. ``garbage``: see `GuardedWork`."""
        if self._asks_nobody:
            loopback()
            return CompletedWork(result)
        work = self._call(name, result, loopback, call, then, on_host=on_host, synchronous=synchronous, garbage=garbage)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _call(
        self,
        name: str,
        result: Any,
        loopback: Callable[[], None],
        call: Callable[[Communicator, bool], dist.Work | None],
        then: Callable[[], None] | None,
        *,
        on_host: bool,
        synchronous: bool,
        garbage: Any,
    ) -> dist.Work:
        world = self.world
        generation = world.enter_collective(self, name, result)
        entered, communicator = world.progress.newest, self.communicator
        if communicator is None or generation is None:
            loopback()
            world.progress.completed(entered)
            return CompletedWork(result)
        if not (on_host or world.queue.is_host):
            entered.reached = world.queue.record_event()
        try:
            work = call(communicator, on_host)
        except RuntimeError as error:
            if is_misuse(error):
                raise
            world.collective_failed(generation, error, result)
            loopback()
            world.progress.completed(entered)
            return CompletedWork(result)
        entered.call = world.blocked.count(self, name, result)
        if entered.reached is not None:
            stands = work is None or (synchronous and not isinstance(work, DeferredWork))
            world.enqueued(entered, communicator, None if stands else work)
        if work is None:
            # NCCL returns None for a synchronous call: it is on the current stream, ahead of what uses its result.
            work = CompletedWork(result)
        return GuardedWork(world, generation, work, result, loopback, then, entered=entered, garbage=garbage)

    def _garbage(self, name: str, result: Any, args: Sequence[Any]) -> Any:
        """Return the part of a broken collective's result that is garbage and that no loopback writes anew: everything
        for operations in place."""
        in_place = name in _IN_PLACE or (name == "broadcast" and args[-1].rootRank != self.group_rank)
        return result if in_place else ()

    def _is_of_device(self, first: torch.Tensor | None) -> bool:
        """Whether the device runs the collective, by its first tensor. A barrier has none and runs on the hosts."""
        return first is not None and first.device.type == self.world.device.type

    @not_compiled
    def sum_on_host(self, values: torch.Tensor) -> None:
        """Sum ``values``, a host tensor, over all ranks in place. Does not involve the device or wait for it."""
        opts = dist.AllreduceOptions()
        self._run(
            on_hosts(self.communicator),
            [values],
            lambda: _sum_of_equals([values], opts, len(self.ranks)),
            [values],
            opts,
            on_host=True,
        ).wait()

    @not_compiled
    def gather_on_host(self, row: torch.Tensor) -> list[torch.Tensor]:
        """Return the ``row`` of every rank, in rank order. ``row``: a 1-d host tensor of the same length on all ranks.

        Where there is a gate tree it is used, so that only the result takes memory in proportion to the group's size.
        """
        rows = torch.zeros(len(self.ranks), len(row), dtype=row.dtype)
        if isinstance(self.communicator, WithGateTree):
            rows[self.group_rank] = row  # zeros elsewhere, where the others put theirs: the sum holds all rows
            everything, opts = rows.view(-1), dist.AllreduceOptions()

            def loopback() -> None:
                rows.copy_(row.expand_as(rows))

            name = on_hosts(self.communicator)
            self._run(name, [everything], loopback, [everything], opts, on_host=True).wait()
        else:
            self.allgather([list(rows)], [row]).wait()
        return list(rows)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the ``data`` of every rank, in rank order. They may differ in length."""
        most = int(self.largest(torch.tensor([len(data)])).item())
        row = torch.zeros(1 + -(-most // 8), dtype=torch.int64)
        row[0] = len(data)  # beside the bytes: if this breaks, all rows are this rank's own
        if data:
            row[1:].view(torch.uint8)[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return [one[1:].view(torch.uint8)[: int(one[0])].numpy().tobytes() for one in self.gather_on_host(row)]

    @not_compiled
    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """Return the element-wise maximum of ``values`` over all ranks, as a host tensor. ``values``: a host tensor.
        Uses the gate tree where there is one, and the device otherwise."""
        opts = dist.AllreduceOptions()
        opts.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        if isinstance(self.communicator, WithGateTree):
            found = values.clone()
            name = on_hosts(self.communicator, largest=True)
            self._run(name, [found], _nothing, [found], opts, on_host=True).wait()
            return found
        on_device = values.to(self.world.device)
        dist.all_reduce(on_device, dist.ReduceOp.MAX, group=self)
        return on_device.cpu()

    @not_compiled
    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Reduce in place over all ranks. Alone or broken, every peer counts as equal to this rank."""
        opts = opts or dist.AllreduceOptions()
        return self._run("allreduce", tensors, lambda: _sum_of_equals(tensors, opts, len(self.ranks)), tensors, opts)

    @not_compiled
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Reduce several tensors in place; on a device, or of several dtypes, one after the other."""
        opts = opts or dist.AllreduceCoalescedOptions()
        plain = dist.AllreduceOptions()
        plain.reduceOp = opts.reduceOp
        if len({tensor.dtype for tensor in tensors}) == 1 and len(tensors) > 0 and tensors[0].device.type == "cpu":
            return self._run(
                "allreduce_coalesced", tensors, lambda: _sum_of_equals(tensors, plain, len(self.ranks)), tensors, opts
            )
        for tensor in tensors:
            self.allreduce([tensor], plain).wait()
        return CompletedWork(tensors)

    @not_compiled
    def broadcast(self, tensors: Tensors, opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Broadcast in place. During set-up, newcomers receive what the root published when the job began."""
        opts = opts or dist.BroadcastOptions()
        loopback = _nothing
        if self.world.in_setup and len(self.ranks) > 1 and not self._asks_nobody:
            turn = self.world.broadcasts.next_key(self.key)
            if self.world.generation and opts.rootRank == self.group_rank:
                self.world.broadcasts.publish(turn, tensors)
            elif not self.world.generation and opts.rootRank != self.group_rank:

                def loopback() -> None:
                    self.world.broadcasts.receive(turn, tensors)

        return self._run("broadcast", tensors, loopback, tensors, opts)

    @not_compiled
    def reduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Reduce to the root, in place; the contents on other ranks are undefined afterwards."""
        opts = opts or dist.ReduceOptions()
        return self._run("reduce", tensors, lambda: _sum_of_equals(tensors, opts, len(self.ranks)), tensors, opts)

    @not_compiled
    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:  # type: ignore[override]
        def loopback() -> None:
            for row, tensor in zip(outputs, inputs, strict=True):
                for output in row:
                    output.copy_(tensor)

        return self._run("allgather", outputs, loopback, outputs, inputs, opts or AllgatherOptions())

    @not_compiled
    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        # outputs[i] holds the tensors of rank i
        def loopback() -> None:
            for row in outputs:
                for output, tensor in zip(row, inputs, strict=True):
                    output.copy_(tensor)

        return self._run("allgather_coalesced", outputs, loopback, outputs, inputs, opts or AllgatherOptions())

    @not_compiled
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:  # noqa: A002
        def loopback() -> None:
            output.view(len(self.ranks), -1).copy_(input.clone().reshape(1, -1))  # FSDP gathers in place

        return self._run("_allgather_base", output, loopback, output, input, opts or AllgatherOptions())

    _allgather_base = all_gather_single

    @not_compiled
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        return CombinedWork([self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)], outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]

    @not_compiled
    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Reduce ``inputs[i][r]`` over all ranks into ``outputs[i]`` of rank r."""
        opts = opts or dist.ReduceScatterOptions()

        if len(outputs) == 1 and outputs[0].device.type == "cpu" and len({tensor.numel() for tensor in inputs[0]}) == 1:
            return self.reduce_scatter_single(outputs[0], torch.cat([tensor.reshape(-1) for tensor in inputs[0]]), opts)

        def loopback() -> None:
            for output, row in zip(outputs, inputs, strict=True):
                output.copy_(row[self.group_rank])
            _sum_of_equals(outputs, opts, len(self.ranks))

        return self._run("reduce_scatter", outputs, loopback, outputs, inputs, opts)

    @not_compiled
    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:  # noqa: A002
        """Reduce ``input`` over all ranks; ``output`` becomes this rank's equal part of it."""
        opts = opts or dist.ReduceScatterOptions()

        def loopback() -> None:
            output.copy_(input.reshape(len(self.ranks), -1)[self.group_rank].view_as(output))
            _sum_of_equals([output], opts, len(self.ranks))

        if input.device.type != "cpu":
            return self._run("_reduce_scatter_base", output, loopback, output, input, opts)
        # gloo does the same, but in a work whose wait has no time limit: a lost wake-up would block this rank for ever.
        whole, sums = input.detach().clone(), dist.AllreduceOptions()
        sums.reduceOp = opts.reduceOp

        def take_part() -> None:
            output.copy_(whole.reshape(len(self.ranks), -1)[self.group_rank].view_as(output))

        return self._run("allreduce", output, loopback, [whole], sums, then=take_part)

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    @not_compiled
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        return CombinedWork(
            [self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)], outputs
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    @not_compiled
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002
        output_splits: Any = (),
        input_splits: Any = (),
        opts: Any = None,
    ) -> dist.Work:
        opts = opts or dist.AllToAllOptions()

        def loopback() -> None:
            if output.shape == input.shape:
                output.copy_(input)
            else:
                output.zero_()

        return self._run("alltoall_base", output, loopback, output, input, output_splits, input_splits, opts)

    alltoall_base = all_to_all_single  # type: ignore[assignment]

    @not_compiled
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        def loopback() -> None:
            mine = inputs[self.group_rank]
            for output in outputs:
                output.copy_(mine) if output.shape == mine.shape else output.zero_()

        return self._run("alltoall", outputs, loopback, outputs, inputs, opts or dist.AllToAllOptions())

    @not_compiled
    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:  # type: ignore[override]
        def loopback() -> None:
            for row, tensor in zip(outputs, inputs, strict=False):
                for output in row:
                    output.copy_(tensor)

        return self._run("gather", outputs, loopback, outputs, inputs, opts or dist.GatherOptions())

    @not_compiled
    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> dist.Work:  # type: ignore[override]
        def loopback() -> None:
            for index, output in enumerate(outputs):
                output.copy_(inputs[index][self.group_rank]) if len(inputs) > index else output.zero_()

        return self._run("scatter", outputs, loopback, outputs, inputs, opts or dist.ScatterOptions())

    @not_compiled
    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> dist.Work:
        self._check_not_coalesced(tensors)
        return self._run("send", tensors, _nothing, tensors, peer, tag)

    @not_compiled
    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> dist.Work:
        """Receive into ``tensors`` from ``peer``, a rank of the group; zeros if the generation is broken."""
        self._check_not_coalesced(tensors)
        return self._run("recv", tensors, lambda: _zero(tensors), tensors, peer, tag)

    @not_compiled
    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        return self._run("recv_anysource", tensors, lambda: _zero(tensors), tensors, tag)

    def batches(self, device: torch.device) -> bool:
        """Whether sends and receives of one batch must be issued as one call, because a device runs them one after the
        other in its stream."""
        return device.type == self.world.device.type and not self.world.queue.is_host

    @not_compiled
    def batch(self, operations: Sequence[PointToPoint]) -> dist.Work:
        """Start all sends and receives at once, in any order."""
        received = [tensor for name, tensor, _, _ in operations if name == "recv"]
        return self._start(
            "batch", received, lambda: _zero(received), lambda communicator, _: communicator.batch(operations)
        )

    @not_compiled
    def barrier(self, opts: Any = None) -> dist.Work:
        return self._run("barrier", [], _nothing, opts or dist.BarrierOptions())


def _first_tensor(args: Sequence[Any]) -> torch.Tensor | None:
    """Return the first tensor among a collective's arguments, or None."""
    while args:
        first = args[0]
        if isinstance(first, torch.Tensor):
            return first
        args = first if isinstance(first, (list, tuple)) and first else args[1:]
    return None


def _nothing() -> None:
    pass


def _zero(tensors: Tensors) -> None:
    for tensor in tensors:
        tensor.zero_()


def _sum_of_equals(tensors: Tensors, opts: Any, size: int) -> None:
    if opts.reduceOp == dist.ReduceOp.SUM and size > 1:
        for tensor in tensors:
            if tensor.dtype is not torch.bool:
                tensor.mul_(size)
