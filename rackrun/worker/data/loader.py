"""Decides which samples a rank computes in a step, and delivers them.

The global batch of a step is cut into *logical shards* (micro-batches), a list that is fixed for the run. The sample
ids of every shard are a pure function of (seed, epoch, step); only the map from shards to data-parallel ranks depends
on which ranks there are. So there is no position in the data to save, lose or repeat. With ``batch="scale_lr"`` the
list is fixed for the step, and the ids also depend on the batches of the steps before it
(`rackrun.worker.data.global_batch`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate

from rackrun.errors import UsageError
from rackrun.worker.batch.batch_runs import place
from rackrun.worker.data.data_run import DataRun
from rackrun.worker.data.dataset_generators import generators_of, state_of
from rackrun.worker.data.rng import derive, reseed
from rackrun.worker.torch_compat.dataloader_workers import end_workers, leave_no_folders, stay

if TYPE_CHECKING:
    from rackrun.worker.steps.step import Step

__all__ = ["LOADER_BITS", "BatchPlan", "Loader", "MapDataset", "Shard", "StepOrder"]

LOADER_BITS = 48
"""An id in the ledger is the sample's index in its data set in the lower 48 bits, and its loader's number in the bits
above."""
_HELD = frozenset({list, tuple, torch.Tensor, np.ndarray, TensorDataset})
"""Types of data sets that only return what they hold and draw no random numbers: seeding would cost more than reading
their samples."""
_LOOKS = 3
"""The number of first batches, in each process, in which a data set's generators are compared."""


_Key: TypeAlias = tuple[int, tuple[int, int], int]
"""(step, where it begins in the data, shard), which determines what is fetched."""


class MapDataset(Protocol):
    """A map-style data set."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class StepOrder(Protocol):
    """The micro-batches of every step, where a framework decides about them and not rackrun's own shuffle. All answers
    are a function of the step alone, and the same on every rank."""

    def shards(self, step: int) -> int:
        """Return the number of micro-batches in the step's global batch. It may differ from step to step."""
        ...

    def samples_before(self, step: int) -> int:
        """Return the number of samples in all steps before ``step``."""
        ...

    def epoch(self, step: int) -> int:
        """Return the epoch of ``step``. Data loading processes do not read ahead beyond it."""
        ...

    def ids(self, step: int, shard: int) -> np.ndarray[Any, Any]:
        """Return the sample ids of one micro-batch of ``step``, int64."""
        ...


@dataclass(frozen=True)
class Shard:
    """One micro-batch: its index in the global batch, and whether it counts."""

    index: int
    ghost: bool = False
    """Whether it is computed with weight 0, so that a rank with fewer shards takes part in the collectives of the
    forward pass."""


@dataclass(frozen=True)
class BatchPlan:
    """The global batch for the whole run: sizes in samples, and the seed. Raises `UsageError` when the sizes do not
    divide."""

    global_batch: int
    micro_batch: int
    seed: int

    def __post_init__(self) -> None:
        if self.micro_batch < 1 or self.global_batch < 1 or self.global_batch % self.micro_batch:
            raise UsageError(
                f"global_batch_size={self.global_batch} is not a multiple of micro_batch_size={self.micro_batch}.",
                remedy="choose sizes of at least 1 that divide.",
            )

    @property
    def facts(self) -> str:
        """The settings that decide which samples a step has and what is random in it, as text."""
        return f"global_batch_size={self.global_batch}, micro_batch_size={self.micro_batch}, seed={self.seed}"

    @property
    def shards(self) -> int:
        """Number of micro-batches in the global batch."""
        return self.global_batch // self.micro_batch

    def shards_of(self, dp_rank: int, dp_size: int, shards: int = 0, shares: Sequence[int] = ()) -> list[Shard]:
        """Return a data-parallel rank's shards: contiguous and as even as possible. Every rank gets the same number;
        the last may be ghosts.

        ``shards``: the number in a step's own global batch, which may be too small for all ranks; 0: the run's.
        ``shares``: the number of shards for each rank, instead of even ones. Raises `UsageError` when the run's batch
        has fewer shards than ranks.
        """
        if not shards and dp_size > self.shards:
            raise UsageError(
                f"{dp_size} data-parallel ranks share {self.shards} micro-batches "
                f"(global batch {self.global_batch}, micro-batch {self.micro_batch}): some would have none.",
                remedy="use a larger global batch, a smaller micro-batch, or fewer ranks.",
            )
        shards = shards or self.shards
        if shares:
            assert (len(shares), sum(shares)) == (dp_size, shards), "shares of another world, or of another batch"
            before = sum(shares[:dp_rank])
            return [Shard(index) for index in range(before, before + shares[dp_rank])]
        first, stop = dp_rank * shards // dp_size, (dp_rank + 1) * shards // dp_size
        most = -(-shards // dp_size)
        mine = [Shard(index) for index in range(first, stop)]
        return mine + [Shard(max(stop - 1, 0), ghost=True)] * (most - len(mine))

    def steps_per_epoch(self, samples: int) -> int:
        """Return the number of steps in an epoch of ``samples`` samples. Raises `UsageError` when they are fewer than
        one global batch."""
        if samples < self.global_batch:
            raise UsageError(
                f"the data set has {samples} samples, fewer than one global batch of {self.global_batch}.",
                remedy="use a smaller global_batch_size or more data.",
            )
        return samples // self.global_batch

    def ids(
        self,
        begins: tuple[int, int],
        shard: int,
        permutation: Callable[[int], np.ndarray[Any, Any]],
    ) -> np.ndarray[Any, Any]:
        """Return the sample ids of one shard, int64, ``micro_batch`` of them. The last, partial batch of an epoch is
        left out.

        ``begins``: where the step begins in the data (`rackrun.worker.batch.batch_runs.place`). ``permutation``:
        returns the order of an epoch's samples.
        """
        epoch, used = begins
        start = used + shard * self.micro_batch
        return permutation(epoch)[start : start + self.micro_batch]


class _Run(DataRun, Protocol):
    @property
    def _order(self) -> StepOrder | None: ...


class Loader:
    """This rank's micro-batches of the current step; iterate over it once in each attempt at a step.

    Before it yields a micro-batch, it seeds all random numbers by (seed, step, shard), makes DDP and FSDP2 synchronise
    gradients on the last micro-batch only, and sets the weight that ``step.backward`` uses.
    """

    def __init__(
        self,
        run: _Run,
        dataset: MapDataset,
        *,
        collate: Callable[[Sequence[Any]], Any] | None,
        shuffle: bool,
        num_workers: int,
        prefetch: int,
    ) -> None:
        if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
            raise UsageError(
                f"run.loader needs a map-style data set (__len__ and __getitem__), not {type(dataset).__name__}.",
                remedy="give it a map-style data set; or give run.stream a function of (shard, shards) that returns one part of the stream.",
            )
        self._run, self._dataset, self._shuffle = run, dataset, shuffle
        self._samples = len(dataset)
        self._plan = run._batch
        self._order = run._order
        if self._order is None:
            self._plan.steps_per_epoch(self._samples)
        self._fetch = _Fetch(
            dataset, collate or cast("Callable[[Sequence[Any]], Any]", default_collate), self._plan.seed
        )
        self._permutations: dict[int, np.ndarray[Any, Any]] = {}
        self.number = 0
        """The loader's number among those of the run, from 0."""
        self._attempt: Step | None = None
        self._given: set[int] = set()
        """The first sample id of each micro-batch delivered in this attempt."""
        self._workers = _Workers(self._fetch, num_workers, prefetch) if num_workers else None

    def __iter__(self) -> Iterator[Any]:
        step = self._run._current_step()
        shards = self._run._my_shards()
        number = int(step)
        begins = self._begins(number)
        reading = self._run._checks.begin_iteration(step, len(shards))
        for turn, shard in enumerate(shards):
            ids = self._ids(number, begins, shard)
            if self._workers:
                batch = self._workers.take((number, begins, shard.index), ids, self._upcoming(number, shards, turn))
                self._run._checks.record_generator_use(reading, self._workers.drawn, None)
            else:
                batch = self._fetch(number, ids)
                self._run._checks.record_generator_use(reading, *self._fetch.drawn)
            last = turn == len(shards) - 1
            self._run._begin_shard(step, shard, last=last, ids=self._counted(step, ids))
            self._run._checks.record_delivery(reading)
            yield _to(batch, self._run.device)
            if step._discarded:
                self._run._checks.check_left_generators()
                return  # a generator of the script goes on, and begins a new iteration in the attempt that there is now
        self._run._checks.end_iteration(reading)

    def close(self) -> None:
        """End the loader's processes."""
        if self._workers:
            self._workers.close()

    def __len__(self) -> int:
        """Return the current number of micro-batches per step on this rank."""
        return len(self._run._my_shards())

    def _counted(self, step: Step, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the ids for the ledger: samples of another data set have other ids, and a second pass in the same step
        is not counted."""
        if self._attempt is not step:
            self._attempt, self._given = step, set()
        if int(ids[0]) in self._given:
            return ids[:0]
        self._given.add(int(ids[0]))
        return ids + (self.number << LOADER_BITS) if self.number else ids

    def _begins(self, step: int) -> tuple[int, int]:
        """Return where ``step`` begins in the data: (epoch, samples used before)."""
        if self._order is not None:
            return self._order.epoch(step), 0
        return place(self._run._batch_of(step).runs, step, self._samples, self._plan.micro_batch)

    def _ids(self, step: int, begins: tuple[int, int], shard: Shard) -> np.ndarray[Any, Any]:
        if self._order is not None:
            return self._order.ids(step, shard.index)
        return self._plan.ids(begins, shard.index, self._permutation)

    def _permutation(self, epoch: int) -> np.ndarray[Any, Any]:
        """Return the order of the samples in ``epoch``, int64; only the newest epoch's is kept."""
        if epoch not in self._permutations:
            self._permutations.clear()
            if self._shuffle:
                order = np.random.Generator(np.random.PCG64(derive(self._plan.seed, "epoch", epoch))).permutation(
                    self._samples
                )
            else:
                order = np.arange(self._samples)
            self._permutations[epoch] = order.astype(np.int64)
        return self._permutations[epoch]

    def _upcoming(self, step: int, shards: Sequence[Shard], turn: int) -> Iterator[tuple[_Key, np.ndarray[Any, Any]]]:
        """Yield the keys and ids that will be needed next, in order. Stops at the end of the epoch, which would need a
        second permutation, and where the global batch changes."""
        epoch, size = self._begins(step)[0], self._run._batch_of(step).shards
        at, start = step, turn + 1
        while (begins := self._begins(at))[0] == epoch and self._run._batch_of(at).shards == size:
            for shard in shards[start:]:
                yield (at, begins, shard.index), self._ids(at, begins, shard)
            at, start = at + 1, 0


class _Fetch:
    """Fetches samples by id and collates them. Each is fetched under a seed of its own (seed, step, sample), in
    whichever process."""

    def __init__(self, dataset: MapDataset, collate: Callable[[Sequence[Any]], Any], seed: int) -> None:
        self._dataset, self._collate, self._seed = dataset, collate, seed
        self._may_draw = type(dataset) not in _HELD or collate is not default_collate
        self._looks = 0
        self.drawn: tuple[str, Any] = "", None
        """Name of a generator of the data set that was drawn from in this process, and the generator; "" and None if
        there is none."""

    def __call__(self, step: int, ids: np.ndarray[Any, Any]) -> Any:
        if self._looks == _LOOKS:
            return self._get(step, ids)
        self._looks += 1
        generators = generators_of(self._dataset)
        before = {name: state_of(generator) for name, generator in generators.items()}
        batch = self._get(step, ids)
        moved = [(name, one) for name, one in generators.items() if state_of(one) != before[name]]
        self.drawn = moved[0] if moved else self.drawn
        return batch

    def _get(self, step: int, ids: np.ndarray[Any, Any]) -> Any:
        samples = []
        for sample in ids.tolist():
            if self._may_draw:
                reseed(self._seed, "sample", step, sample)
            samples.append(self._dataset[sample])
        return self._collate(samples)


class _Workers:
    """Prefetches in the processes of a torch DataLoader exactly the batches that will be needed.

    One iteration over the DataLoader is a stream of requests. A repeated step needs batches that were delivered
    already; the main process fetches those again.
    """

    def __init__(self, fetch: _Fetch, processes: int, prefetch: int) -> None:
        leave_no_folders()
        self._fetch, self._processes, self._prefetch = fetch, processes, max(prefetch, 1)
        self._stream: Iterator[Any] | None = None
        self._expected: list[_Key] = []
        self.drawn = ""
        """Name of a generator of the data set that was drawn from in one of the processes; "" if there is none."""

    def take(
        self,
        key: _Key,
        ids: np.ndarray[Any, Any],
        upcoming: Iterator[tuple[_Key, np.ndarray[Any, Any]]],
    ) -> Any:
        """Return the batch for ``key``, from the processes or, for a repeated step, loaded here."""
        if self._expected and key < self._expected[0]:
            return self._fetch(key[0], ids)  # the step is being repeated
        if key not in self._expected:  # first use, or a promoted spare that has tried step 0
            self._start(key, ids, upcoming)
        assert self._stream is not None
        while True:  # skip what a step has not read
            batch, drawn = next(self._stream)
            self.drawn = drawn or self.drawn
            if self._expected.pop(0) == key:
                return batch

    def close(self) -> None:
        """End the worker processes, if there are any."""
        stream, self._stream, self._expected = self._stream, None, []
        if stream is not None:
            end_workers(stream)

    def _start(
        self,
        key: _Key,
        ids: np.ndarray[Any, Any],
        upcoming: Iterator[tuple[_Key, np.ndarray[Any, Any]]],
    ) -> None:
        self._expected = []

        def requests() -> Iterator[list[tuple[int, np.ndarray[Any, Any]]]]:
            self._expected.append(key)
            yield [(key[0], ids)]
            for later, later_ids in upcoming:
                self._expected.append(later)
                yield [(later[0], later_ids)]

        loader = DataLoader(
            _ByRequest(self._fetch),
            batch_sampler=_Once(requests()),
            num_workers=self._processes,
            prefetch_factor=self._prefetch,
            collate_fn=_only,
            worker_init_fn=stay,
        )
        self._stream = iter(loader)


class _ByRequest(torch.utils.data.Dataset[Any]):
    """A data set whose index is a whole request: (step, ids of one micro-batch)."""

    rackrun_delivers = True
    """Marks it as no data set of the script's own (`rackrun.worker.torch_compat.unhooked_calls`)."""

    def __init__(self, fetch: _Fetch) -> None:
        self._fetch = fetch

    def __getitem__(self, request: tuple[int, np.ndarray[Any, Any]]) -> Any:
        return self._fetch(*request), self._fetch.drawn[0]


class _Once:
    def __init__(self, requests: Iterator[list[Any]]) -> None:
        self._requests = requests

    def __iter__(self) -> Iterator[list[Any]]:
        return self._requests


def _only(batches: list[Any]) -> Any:
    return batches[0]


def _to(batch: Any, device: torch.device) -> Any:
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: _to(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        moved = [_to(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch
