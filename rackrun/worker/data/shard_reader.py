"""Reads one data shard of a stream, micro-batch by micro-batch, from any position that is asked for."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils.data import default_collate

from rackrun.errors import StepError, UsageError
from rackrun.worker.data.rng import reseed
from rackrun.worker.data.stream_positions import ShardEntry, start_of
from rackrun.worker.data.stream_states import decode_state, digest_of, encode_state
from rackrun.worker.torch_compat.dataloader_workers import children_stay, end_workers, let_workers_stay
from rackrun.worker.torch_compat.unhooked_calls import unobserved

__all__ = ["ShardReader", "StreamSource", "buffers_a_shuffle", "copied"]


@dataclass(frozen=True)
class StreamSource:
    """What the readers of all data shards of one stream have in common."""

    make: Callable[[int, int], Any]
    """Returns the iterable over the samples of a data shard, given its index and the number of data shards. It is
    called for each epoch."""
    shards: int
    micro_batch: int
    collate: Callable[[Sequence[Any]], Any] | None
    batched: bool
    """Whether an item of the iterable is a whole micro-batch."""
    seed: int
    number: int
    """The stream's number among the loaders of the run."""
    progress: Callable[[], None] = lambda: None
    """Called after each item."""
    slow: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """Makes a context in which an item may take long."""


class ShardReader:
    """Reads the data shard ``shard``. It stands at `position`, and holds the micro-batches that it was last asked
    for."""

    def __init__(self, source: StreamSource, shard: int) -> None:
        self._source, self.shard = source, shard
        self.stream: Any = None
        """The iterable that is being read; None before the first read."""
        self._iterator: Iterator[Any] | None = None
        self._position = self._epoch = self._items = 0
        self._fresh = False
        """Whether the iteration has begun, and has not given an item yet."""
        self._kept: dict[int, Any] = {}
        self._entries: dict[int, ShardEntry] = {}
        self.has_state = False
        """Whether the iterable, or its iterator, has ``state_dict`` and ``load_state_dict``."""

    def forget_before(self, position: int) -> None:
        """Drop the micro-batches before ``position``: the steps that used them are committed."""
        self._kept = {at: batch for at, batch in self._kept.items() if at >= position}
        self._entries = {at: entry for at, entry in self._entries.items() if at > position}

    def take(self, position: int, known: Sequence[ShardEntry] = (), *, record: str = "") -> Any:
        """Return the micro-batch at ``position``, and keep it. It is a copy, since an iterable may fill one buffer again
        and again.

        ``known``: the last entries of this data shard, older first. ``record``: ``"state"`` or ``"digest"``, what
        `entry` returns afterwards; "" for nothing. Raises `StepError` when the stream does not give the micro-batches
        that it gave before, and `UsageError` when it has no samples.
        """
        if position not in self._kept or (record and position + 1 not in self._entries):
            try:
                self._go_to(position, known)
                batch = copied(self._read())
                if record:
                    self._entries[position + 1] = self._entry(batch, with_state=record == "state")
                self._kept[position] = batch
            except BaseException:
                self.close()  # an iterator that has raised is over: it would look like the end of an epoch
                raise
        return self._kept[position]

    def entry(self, position: int) -> ShardEntry:
        """Return the entry for ``position``, from the last `take` of the micro-batch before it."""
        return self._entries[position]

    def begin_at(self, entry: ShardEntry | None) -> None:
        """Open the iterable at ``entry``, or at its beginning."""
        self.close()
        self._position, self._epoch, self._items = 0, 0, 0
        if entry is not None:
            self._position, self._epoch, self._items = entry.position, entry.epoch, entry.items
        state = decode_state(entry.state) if entry is not None and entry.state else None
        self._open(state)

    def close(self) -> None:
        """Drop the iterable with its processes, and all micro-batches."""
        stream, iterator = self.stream, self._iterator
        self.stream = self._iterator = None
        self._kept, self._entries = {}, {}
        _close(stream, iterator)

    # -- helpers
    def _go_to(self, position: int, known: Sequence[ShardEntry]) -> None:
        """Stand at ``position``: read forward from where the reader is, or from an entry if that is nearer or the only
        way."""
        if self._iterator is not None and self._position == position:
            return
        start = start_of(known, position)
        if self._iterator is None or not (start.position if start else 0) <= self._position <= position:
            self.begin_at(start)
        digests = {entry.position: entry.digest for entry in known}
        with self._source.slow():
            while self._position < position:
                batch = self._read()
                self._check(batch, digests.get(self._position))

    def _check(self, batch: Any, digest: int | None) -> None:
        if digest is not None and digest_of(batch) != digest:
            raise StepError(
                f"data shard {self.shard} of stream {self._source.number} was read again, and its micro-batch {self._position - 1} is not the one that "
                "was trained on. Training would go on with other data.",
                remedy="let make(shard, shards) return the same samples in the same order each time and on each host: the same files, and a "
                "shuffle with a fixed seed.",
            )

    def _read(self) -> Any:
        """Read the next micro-batch."""
        source = self._source
        count = 1 if source.batched else source.micro_batch
        with unobserved(), children_stay():
            items = [self._next(self._position * count + index) for index in range(count)]
        self._position += 1
        reseed(source.seed, "stream", source.number, self.shard, "collate", self._position)
        if source.batched:
            return items[0] if source.collate is None else source.collate(items[0])
        collate = source.collate or cast("Callable[[Sequence[Any]], Any]", default_collate)
        return collate(items)

    def _next(self, ordinal: int) -> Any:
        """Return the item with this number in the whole stream. When an epoch ends, the next one begins."""
        source = self._source
        while True:
            assert self._iterator is not None, "it was opened"
            reseed(source.seed, "stream", source.number, self.shard, ordinal)
            try:
                with source.slow() if self._fresh else contextlib.nullcontext():
                    item = next(self._iterator)
            except StopIteration:
                if not self._items:
                    raise UsageError(
                        f"data shard {self.shard} of {source.shards} of stream {source.number} has no samples"
                        + (f" in epoch {self._epoch}." if self._epoch else "."),
                        remedy=f"let make(shard, {source.shards}) return samples for each shard, in each epoch: there are as many data shards as "
                        "micro-batches in the global batch.",
                    ) from None
                self._begin_epoch()
                continue
            self._fresh = False
            self._items += 1
            source.progress()
            return item

    def _begin_epoch(self) -> None:
        """Make the iterable anew. What it remembers of former epochs, or of a state that was loaded, would be another
        thing on a rank that has taken the data shard over."""
        self._epoch, self._items = self._epoch + 1, 0
        _close(self.stream, self._iterator)
        self._open(None)

    def _open(self, state: Any) -> None:
        """Make the iterable, and begin to read it in the current epoch, at ``state`` if that is not None."""
        source = self._source
        reseed(source.seed, "stream", source.number, self.shard, "make")
        with unobserved(), children_stay(), source.slow():
            self.stream = source.make(self.shard, source.shards)
            if not hasattr(self.stream, "__iter__"):
                raise UsageError(
                    f"make(shard, shards), given to run.stream, has returned a {type(self.stream).__name__}, which is no iterable.",
                    remedy="let it return an iterable over the samples of one data shard.",
                )
            let_workers_stay(self.stream)
            self._seed_epoch()
            on_stream = _has_state(self.stream)
            if state is not None and on_stream:
                self.stream.load_state_dict(state)
            self._iterator, self._fresh = iter(self.stream), True
            self.has_state = on_stream or _has_state(self._iterator)
            if state is not None and not on_stream:
                cast("Any", self._iterator).load_state_dict(state)

    def _seed_epoch(self) -> None:
        """Tell the iterable the epoch, and seed what it draws when its iteration begins."""
        if hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(self._epoch)
        reseed(self._source.seed, "stream", self._source.number, self.shard, "epoch", self._epoch)

    def _entry(self, batch: Any, *, with_state: bool) -> ShardEntry:
        state = b""
        if with_state and self.has_state:
            holder = self.stream if _has_state(self.stream) else self._iterator
            state = encode_state(cast("Any", holder).state_dict())
        return ShardEntry(self._position, self._epoch, self._items, state, digest_of(batch))


def buffers_a_shuffle(stream: Any) -> bool:
    """Whether ``stream`` is an ``IterableDataset`` of Hugging Face datasets (4 and 5) with a shuffle buffer, which its
    state does not cover."""
    one = getattr(stream, "_ex_iterable", None)
    while one is not None and type(one).__name__ != "BufferShuffledExamplesIterable":
        one = getattr(one, "ex_iterable", None)
    return one is not None


def _has_state(thing: Any) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def _close(stream: Any, iterator: Any) -> None:
    """End the processes of an iteration, and close what can be closed."""
    if iterator is not None:
        end_workers(iterator)
    for one in (iterator, stream):
        close = getattr(one, "close", None)
        if callable(close):
            with contextlib.suppress(Exception):  # it is not read any more: whatever it says changes nothing
                close()


def copied(batch: Any, device: torch.device | None = None) -> Any:
    """Return a copy of ``batch``, its tensors on ``device``; None: where they are.

    Other classes of dictionaries, lists and tuples are kept on a CPU. For another device they become what a `Loader`
    makes of them. Raises `UsageError` where something cannot be copied.
    """
    moves = device is not None and device.type != "cpu"
    if isinstance(batch, torch.Tensor):
        there = batch if device is None else batch.to(device, non_blocking=True)
        return there.clone() if there is batch else there
    if type(batch) is dict or (moves and isinstance(batch, dict)):
        return {key: copied(value, device) for key, value in batch.items()}
    if hasattr(batch, "_fields") and isinstance(batch, tuple):
        return type(batch)(*(copied(value, device) for value in batch))
    if type(batch) in (list, tuple) or (moves and isinstance(batch, (list, tuple))):
        return type(batch)([copied(value, device) for value in batch])
    try:
        return copy.deepcopy(batch)
    except Exception as error:
        raise UsageError(
            f"a micro-batch of run.stream holds a {type(batch).__qualname__}, which cannot be copied: {error}.",
            remedy="let collate return tensors, arrays, numbers, texts, and lists and dictionaries of them.",
        ) from error
