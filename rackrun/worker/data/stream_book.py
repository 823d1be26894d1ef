"""Keeps how far every data shard of every stream has been read, and what is needed to read on from there.

The book is tracked state, equal on all ranks. So a rank that takes another's place has it, snapshots and checkpoints
hold it, and a rollback restores an older one. For each stream it counts the committed steps that have read it. From
this count follows the *position* of each data shard: the number of its micro-batches that committed steps have used.
Every few steps each rank adds an entry for each data shard that it has read: the state of the stream, and a digest of
the micro-batch before it. The ranks exchange these entries before the gate, and they are kept when the unit is
committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from rackrun.errors import StepError, UsageError

__all__ = ["Entry", "StreamBook", "start_of"]


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """What is known of one data shard after some of its micro-batches were read."""

    position: int
    """Number of micro-batches read."""
    epoch: int
    items: int
    """Number of items that the current epoch has given so far."""
    state: bytes
    """The state of the stream, as `encode_state` returns it; empty where a stream has none."""
    digest: int
    """`digest_of` the last micro-batch read."""


class _Page(msgspec.Struct):
    """One stream."""

    every: int
    turns: int = 0
    """Number of committed steps that have read the stream."""
    runs: list[tuple[int, int]] = []
    """(first turn, micro-batches in the global batch), each valid until the next."""
    entries: dict[int, tuple[Entry, ...]] = {}
    """Data shard -> its last two entries, the older first."""
    packed: bytes | None = None
    """``entries`` as bytes; None where they have changed since."""


class _Reads(msgspec.Struct):
    """What one attempt at a step has read."""

    step: Any
    """The attempt."""
    shards: dict[int, int] = {}
    """Stream -> micro-batches in the global batch."""
    mine: dict[int, dict[int, Entry]] = {}
    """Stream -> data shard -> entry, of this rank."""
    all: dict[int, dict[int, Entry]] = {}
    """The same of all ranks, once they are exchanged."""


class StreamBook:
    """The positions of all streams of a run. ``shards``: number of data shards, ``micro_batch``: samples in a
    micro-batch; both are fixed for the run."""

    def __init__(self, shards: int, micro_batch: int) -> None:
        self._sizes = [shards, micro_batch]
        self._pages: list[_Page] = []
        self._reads: _Reads | None = None
        self.closers: list[Callable[[], None]] = []
        """What closes the readers of this rank, one for each stream."""

    def add(self, every: int) -> int:
        """Add a stream, and return its index. ``every``: steps from one entry to the next."""
        self._pages.append(_Page(every))
        return len(self._pages) - 1

    def close_readers(self) -> None:
        """Close all readers of this rank, with their processes."""
        for close in self.closers:
            close()

    # -- what is known
    def turn(self, stream: int) -> int:
        """Return how many committed steps have read the stream: the number of the next such step."""
        return self._pages[stream].turns

    def position(self, stream: int, shard: int) -> int:
        """Return how many micro-batches of the data shard committed steps have used. Steps with a smaller global batch
        leave the last shards where they are."""
        page = self._pages[stream]
        stops = [*(first for first, _ in page.runs[1:]), page.turns][: len(page.runs)]
        return sum(stop - first for (first, shards), stop in zip(page.runs, stops, strict=True) if shard < shards)

    def entries(self, stream: int, shard: int) -> tuple[Entry, ...]:
        """Return the last entries of the data shard, at most two, the older first."""
        return self._pages[stream].entries.get(shard, ())

    def is_due(self, stream: int) -> bool:
        """Whether the next step that reads the stream adds entries: the first one, and each ``every``-th."""
        page = self._pages[stream]
        return page.turns == 0 or (page.turns + 1) % page.every == 0

    def is_audited(self, stream: int) -> bool:
        """Whether the entries of the next step that reads the stream are compared with what is read again from those
        before: the 1st, the 2nd, the 4th, the 8th and so on."""
        page = self._pages[stream]
        number = (page.turns + 1) // page.every
        return number & (number - 1) == 0

    # -- one attempt
    def begins(self, step: Any, stream: int, shards: int) -> None:
        """Note that the attempt ``step`` reads the stream. ``shards``: micro-batches in the step's global batch."""
        if self._reads is None or self._reads.step is not step:
            self._reads = _Reads(step)
        self._reads.shards[stream] = shards

    def has_read(self, step: Any, stream: int, shard: int, entry: Entry) -> None:
        """Add this rank's entry of a data shard, in an attempt in which entries are due."""
        assert self._reads is not None, "the attempt has begun to read"
        assert self._reads.step is step, "no other attempt has begun since"
        self._reads.mine.setdefault(stream, {})[shard] = entry

    def exchange(self, step: Any, gather: Callable[[bytes], Sequence[bytes]]) -> None:
        """Exchange the entries that are due in the attempt ``step``, before its gate. Collective where any is due, also
        of a stream that this rank does not read: another may.

        ``gather`` returns the bytes of all ranks. Raises `StepError` when the ranks have not read the same streams.
        """
        if step._at.phase or not any(map(self.is_due, range(len(self._pages)))):
            return
        reads = self._reads
        if reads is None or reads.step is not step:
            reads = self._reads = _Reads(step)
        read = {stream: self.turn(stream) for stream in sorted(reads.shards)}
        rows = [
            msgspec.msgpack.decode(row, type=tuple[dict[int, int], dict[int, dict[int, Entry]]])
            for row in gather(msgspec.msgpack.encode((read, reads.mine)))
        ]
        if any(other != read for other, _ in rows):
            raise StepError(
                f"the ranks do not read the same streams in step {int(step)}.",
                remedy="iterate over the same run.stream on all ranks.",
            )
        reads.all = {}
        for _, entries in rows:
            for stream, by_shard in entries.items():
                reads.all.setdefault(stream, {}).update(by_shard)

    def committed(self, step: Any) -> None:
        """Keep what the attempt ``step`` has read, because it is committed."""
        reads, self._reads = self._reads, None
        if reads is None or reads.step is not step:
            return
        for stream, shards in reads.shards.items():
            page = self._pages[stream]
            if not page.runs or page.runs[-1][1] != shards:
                page.runs.append((page.turns, shards))
            page.turns += 1
            for shard, entry in reads.all.get(stream, {}).items():
                page.entries[shard] = (*page.entries.get(shard, ()), entry)[-2:]
                page.packed = None

    def trial_over(self) -> None:
        """Drop what a spare has read in its trial."""
        self.close_readers()

    # -- tracked
    def state_dict(self) -> dict[str, Any]:
        """Return positions and entries."""
        pages = []
        for page in self._pages:
            if page.packed is None:
                page.packed = msgspec.msgpack.encode(sorted(page.entries.items()))
            pages.append({"turns": page.turns, "runs": [list(run) for run in page.runs], "entries": page.packed})
        return {"sizes": list(self._sizes), "streams": pages}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`. Raises `UsageError` when it is of other sizes, or of another number of
        streams."""
        if list(state["sizes"]) != self._sizes or len(state["streams"]) != len(self._pages):
            raise UsageError(
                f"the training that goes on has read {len(state['streams'])} stream(s) in {state['sizes'][0]} data shards with micro-batches of "
                f"{state['sizes'][1]} samples; this script reads {len(self._pages)} in {self._sizes[0]} with {self._sizes[1]}.",
                remedy="keep global_batch_size, micro_batch_size and the calls of run.stream; or begin with another --checkpoint-dir.",
            )
        self._reads = None
        for page, known in zip(self._pages, state["streams"], strict=True):
            page.turns, page.packed = int(known["turns"]), bytes(known["entries"])
            page.runs = [(int(first), int(shards)) for first, shards in known["runs"]]
            page.entries = dict(msgspec.msgpack.decode(page.packed, type=list[tuple[int, tuple[Entry, ...]]]))


def start_of(entries: Iterable[Entry], position: int) -> Entry | None:
    """Return where a reader begins that is to stand at ``position``; None: at the beginning of the stream.

    It begins at the last entry but one, and so reads a micro-batch again whose digest is known. Where data have
    changed, that shows before anybody trains on them.
    """
    usable = [entry for entry in entries if entry.position <= position and entry.state]
    return usable[-2] if len(usable) > 1 else None
