"""Delivers this rank's micro-batches of a step from streams: data that can only be read from front to back.

There is one stream for each data shard, and a data shard for each micro-batch of the global batch. In the n-th step
that reads them, micro-batch i is the n-th micro-batch of data shard i, whichever rank computes it. A rank reads the
data shards of its micro-batches, and keeps those of the current step until it is committed, so a step that is done
again reads nothing again. A rank that needs a data shard at another position opens it anew, at a state that the
`StreamPositions` has, and reads forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from rackrun.checkpoint.base.messages import say
from rackrun.errors import StepError, UsageError
from rackrun.worker.data.data_run import DataRun
from rackrun.worker.data.loader import LOADER_BITS, Shard
from rackrun.worker.data.shard_reader import ShardReader, StreamSource, buffers_a_shuffle, copied
from rackrun.worker.data.stream_positions import ShardEntry, StreamPositions
from rackrun.worker.data.stream_states import digest_of
from rackrun.worker.torch_compat.dataloader_workers import leave_no_folders

if TYPE_CHECKING:
    from rackrun.worker.steps.step import Step

__all__ = ["STATE_EVERY", "Stream"]

STATE_EVERY = 16
"""Steps from one record of a stream's state to the next, where the script does not say."""
_DIGEST_EVERY = 16
"""Steps from one digest to the next, where no state is recorded."""
_LARGE_BYTES = 2**20
_OPENS_MS = 600_000
"""How long it may take at least to open a data shard, or to read an item that is dropped: as long as a first step."""


class _Run(DataRun, Protocol):
    @property
    def rank(self) -> int: ...
    def _is_trial(self) -> bool: ...
    def _progress(self) -> None: ...


class Stream:
    """This rank's micro-batches of the current step, read from streams; iterate over it once in each attempt at a step,
    as over a `Loader`."""

    def __init__(
        self,
        run: _Run,
        positions: StreamPositions,
        make: Callable[[int, int], Any],
        *,
        number: int,
        collate: Callable[[Sequence[Any]], Any] | None,
        batched: bool,
        state_every: int,
    ) -> None:
        if not callable(make):
            raise UsageError(
                f"run.stream needs a function of (shard, shards), not a {type(make).__name__}.",
                remedy="give it a function that returns the samples of one data shard, such as lambda shard, shards: "
                "dataset.shard(num_shards=shards, index=shard).",
            )
        if state_every < 0:
            raise UsageError(f"state_every={state_every} is negative.", remedy="give a number of steps, or 0.")
        leave_no_folders()
        self._run, self._positions, self._plan = run, positions, run._batch
        self._with_state = state_every > 0
        self._index = positions.add(state_every or _DIGEST_EVERY)
        self._number = number
        self._source = StreamSource(
            make=make,
            shards=self._plan.shards,
            micro_batch=self._plan.micro_batch,
            collate=collate,
            batched=batched,
            seed=self._plan.seed,
            number=number,
            progress=run._progress,
            slow=lambda: run._current_step()._world.page.with_limit_at_least(_OPENS_MS),
        )
        self._readers: dict[int, ShardReader] = {}
        self._attempt: Step | None = None
        self._given: set[int] = set()
        """Data shards of which a micro-batch was delivered in this attempt."""
        self._said: set[str] = set()
        positions.closers.append(self.close)

    def __iter__(self) -> Iterator[Any]:
        step, shards = self._run._current_step(), self._run._my_shards()
        if step._at.phase:
            raise StepError(
                "run.stream was read in a phase, and the next step would read the same samples again.",
                remedy="give a phase data of its own, such as a DataLoader over a validation set.",
            )
        trial = self._run._is_trial()
        if not trial:
            self._begin(step, shards)
        reading = self._run._checks.begin_iteration(step, len(shards))
        for turn, shard in enumerate(shards):
            batch = self._for_trial(shards[0].index) if trial else self._take(step, shard, first=turn == 0)
            last = turn == len(shards) - 1
            self._run._begin_shard(step, shard, last=last, ids=self._ids(shard))
            self._run._checks.record_delivery(reading)
            yield copied(batch, self._run.device)
            if step._discarded:
                self._run._checks.check_left_generators()
                return  # as in `Loader`
        self._run._checks.end_iteration(reading)

    def __len__(self) -> int:
        """Return the current number of micro-batches per step on this rank."""
        return len(self._run._my_shards())

    def close(self) -> None:
        """Close all readers, with their processes."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    # -- helpers
    def _begin(self, step: Step, shards: Sequence[Shard]) -> None:
        """Begin to read in an attempt: drop what committed steps have used, and data shards that other ranks read."""
        if self._attempt is not step:
            self._attempt, self._given = step, set()
            count = self._run._batch_of(int(step)).shards
            # the gate detects a rank that does not read this stream, or at another position
            step._world.order.add(f"stream {self._index} {self._positions.steps_read(self._index)} {count}")
            self._positions.begins(step, self._index, count)
        wanted = {shard.index for shard in shards}
        for index in [index for index in self._readers if index not in wanted]:
            self._readers.pop(index).close()
        for index, reader in self._readers.items():
            reader.forget_before(self._positions.position(self._index, index))

    def _take(self, step: Step, shard: Shard, *, first: bool) -> Any:
        positions, index = self._positions, shard.index
        if index not in self._readers:
            self._readers[index] = ShardReader(self._source, index)
        reader, position, known = self._readers[index], positions.position(self._index, index), self._known(index)
        due = positions.is_due(self._index)
        batch = reader.take(position, known, record=self._record if due else "")
        if due and not shard.ghost:
            entry = reader.entry(position + 1)
            positions.has_read(step, self._index, index, entry)
            self._notice(reader, entry)
            if first and not position:
                self._check_reopening(reader, entry)
            elif first and known and known[-1].state:
                first_end = known[-1].epoch == 0 < entry.epoch
                if first_end or positions.is_audit_due(self._index):
                    self._audit(reader, known[-1], entry)
        return batch

    def _known(self, shard: int) -> tuple[ShardEntry, ...]:
        """Return the last entries of a data shard. A script that wants no states kept is not given older ones."""
        found = self._positions.entries(self._index, shard)
        return found if self._with_state else tuple(msgspec.structs.replace(entry, state=b"") for entry in found)

    @property
    def _record(self) -> str:
        return "state" if self._with_state else "digest"

    def _check_reopening(self, reader: ShardReader, entry: ShardEntry) -> None:
        """Read the second micro-batch as a process would that takes this rank over, and compare. Raises `StepError` when
        they differ, and `UsageError` when ``make`` returns one iterable twice."""
        if entry.state and buffers_a_shuffle(reader.stream):
            raise self._not_repeatable(reader, entry.state)
        expected = digest_of(reader.take(1, record=self._record))
        probe = ShardReader(self._source, reader.shard)
        try:
            probe.begin_at(entry if entry.state else None)
            if probe.stream is reader.stream:
                raise UsageError(
                    "make(shard, shards), given to run.stream, has returned one and the same iterable twice.",
                    remedy="let it make a new one at each call: a process that takes a rank over, or goes back to a snapshot, reads it again.",
                )
            found = digest_of(probe.take(1))
        finally:
            probe.close()
        if found != expected:
            raise self._not_repeatable(reader, entry.state)

    def _audit(self, reader: ShardReader, older: ShardEntry, newer: ShardEntry) -> None:
        """Read from the ``older`` entry to the ``newer`` one as a process would that takes this rank over. Raises
        `StepError` when the data differ: better now than after a failure."""
        probe = ShardReader(self._source, reader.shard)
        try:
            probe.begin_at(older)
            found = digest_of(probe.take(newer.position - 1))
        finally:
            probe.close()
        if found != newer.digest:
            raise self._not_repeatable(reader, older.state)

    def _not_repeatable(self, reader: ShardReader, state: bytes) -> StepError:
        what = (
            f"data shard {reader.shard} of stream {self._number} does not give the same samples when it is read again"
        )
        if state:
            return StepError(
                f"{what} from its own state_dict(). (What a shuffle buffer holds is often not in the state, nor what a loader's own processes draw.) A process that takes a rank over would "
                "train on other samples.",
                remedy="shuffle in a way that the state covers, such as the order of files; or give run.stream state_every=0, and the stream is read again "
                "from its beginning, which takes as long as it did before.",
            )
        return StepError(
            f"{what}. A process that takes a rank over would train on other samples.",
            remedy="let make(shard, shards) return the same samples in the same order each time: a shuffle with a fixed seed, and no generator that "
            "was drawn from.",
        )

    def _notice(self, reader: ShardReader, entry: ShardEntry) -> None:
        if not reader.has_state or not self._with_state:
            why = "has no state_dict and load_state_dict" if self._with_state else "was given state_every=0"
            self._say(
                f"stream {self._number} {why}: a process that takes a rank over, and a job that goes on from a checkpoint, read it again from its "
                "beginning. That takes as long as reading it took before."
            )
        elif len(entry.state) > _LARGE_BYTES:
            self._say(
                f"the state of stream {self._number} has {len(entry.state) / 2**20:.1f} MiB for one data shard. All ranks keep those of all "
                f"{self._source.shards} data shards twice, and exchange them with each other every {STATE_EVERY} steps or as state_every= says."
            )

    def _for_trial(self, shard: int) -> Any:
        """Return the first micro-batch of a data shard, for a spare that tries the step function."""
        if shard not in self._readers:
            self._readers[shard] = ShardReader(self._source, shard)
        return self._readers[shard].take(0)

    def _ids(self, shard: Shard) -> np.ndarray[Any, Any]:
        """Return the ids of a micro-batch for the ledger, int64: each sample of the stream has another one, in all
        epochs. A second pass in the same step is not counted."""
        if shard.ghost or shard.index in self._given:
            return np.empty(0, np.int64)
        self._given.add(shard.index)
        first = self._positions.position(self._index, shard.index) * self._plan.micro_batch
        ids = np.arange(first, first + self._plan.micro_batch, dtype=np.int64) * self._source.shards + shard.index
        return ids + (self._number << LOADER_BITS)

    def _say(self, text: str) -> None:
        if self._run.rank == 0 and text not in self._said:
            self._said.add(text)
            say(text)
