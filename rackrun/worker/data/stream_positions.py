"""Keeps how far every data shard of every stream has been read, and what is needed to read on from there.

This is tracked state, equal on all ranks. So a rank that takes another's place has it, snapshots and checkpoints
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

__all__ = ["ShardEntry", "StreamPositions", "start_of"]


class ShardEntry(msgspec.Struct, frozen=True, array_like=True):
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


class _OneStream(msgspec.Struct):
    """One stream."""

    every: int
    steps_read: int = 0
    """Number of committed steps that have read the stream."""
    runs: list[tuple[int, int]] = []
    """(first such step, micro-batches in the global batch), each valid until the next."""
    entries: dict[int, tuple[ShardEntry, ...]] = {}
    """Data shard -> its last two entries, the older first."""
    packed: bytes | None = None
    """``entries`` as bytes; None where they have changed since."""


class _Reads(msgspec.Struct):
    """What one attempt at a step has read."""

    step: Any
    """The attempt."""
    shards: dict[int, int] = {}
    """Stream -> micro-batches in the global batch."""
    mine: dict[int, dict[int, ShardEntry]] = {}
    """Stream -> data shard -> entry, of this rank."""
    all: dict[int, dict[int, ShardEntry]] = {}
    """The same of all ranks, once they are exchanged."""


class StreamPositions:
    """The positions of all streams of a run. ``shards``: number of data shards, ``micro_batch``: samples in a
    micro-batch; both are fixed for the run."""

    def __init__(self, shards: int, micro_batch: int) -> None:
        self._sizes = [shards, micro_batch]
        self._streams: list[_OneStream] = []
        self._reads: _Reads | None = None
        self.closers: list[Callable[[], None]] = []
        """What closes the readers of this rank, one for each stream."""

    def add(self, every: int) -> int:
        """Add a stream, and return its index. ``every``: steps from one entry to the next."""
        self._streams.append(_OneStream(every))
        return len(self._streams) - 1

    def close_readers(self) -> None:
        """Close all readers of this rank, with their processes."""
        for close in self.closers:
            close()

    # -- what is known
    def steps_read(self, stream: int) -> int:
        """Return how many committed steps have read the stream: the number of the next such step."""
        return self._streams[stream].steps_read

    def position(self, stream: int, shard: int) -> int:
        """Return how many micro-batches of the data shard committed steps have used. Steps with a smaller global batch
        leave the last shards where they are."""
        one = self._streams[stream]
        stops = [*(first for first, _ in one.runs[1:]), one.steps_read][: len(one.runs)]
        return sum(stop - first for (first, shards), stop in zip(one.runs, stops, strict=True) if shard < shards)

    def entries(self, stream: int, shard: int) -> tuple[ShardEntry, ...]:
        """Return the last entries of the data shard, at most two, the older first."""
        return self._streams[stream].entries.get(shard, ())

    def is_due(self, stream: int) -> bool:
        """Whether the next step that reads the stream adds entries: the first one, and each ``every``-th."""
        one = self._streams[stream]
        return one.steps_read == 0 or (one.steps_read + 1) % one.every == 0

    def is_audit_due(self, stream: int) -> bool:
        """Whether the entries of the next step that reads the stream are compared with what is read again from those
        before: the 1st, the 2nd, the 4th, the 8th and so on."""
        one = self._streams[stream]
        number = (one.steps_read + 1) // one.every
        return number & (number - 1) == 0

    # -- one attempt
    def begins(self, step: Any, stream: int, shards: int) -> None:
        """Note that the attempt ``step`` reads the stream. ``shards``: micro-batches in the step's global batch."""
        if self._reads is None or self._reads.step is not step:
            self._reads = _Reads(step)
        self._reads.shards[stream] = shards

    def has_read(self, step: Any, stream: int, shard: int, entry: ShardEntry) -> None:
        """Add this rank's entry of a data shard, in an attempt in which entries are due."""
        assert self._reads is not None, "the attempt has begun to read"
        assert self._reads.step is step, "no other attempt has begun since"
        self._reads.mine.setdefault(stream, {})[shard] = entry

    def exchange(self, step: Any, gather: Callable[[bytes], Sequence[bytes]]) -> None:
        """Exchange the entries that are due in the attempt ``step``, before its gate. Collective where any is due, also
        of a stream that this rank does not read: another may.

        ``gather`` returns the bytes of all ranks. Raises `StepError` when the ranks have not read the same streams.
        """
        if step._at.phase or not any(map(self.is_due, range(len(self._streams)))):
            return
        reads = self._reads
        if reads is None or reads.step is not step:
            reads = self._reads = _Reads(step)
        read = {stream: self.steps_read(stream) for stream in sorted(reads.shards)}
        rows = [
            msgspec.msgpack.decode(row, type=tuple[dict[int, int], dict[int, dict[int, ShardEntry]]])
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
            one = self._streams[stream]
            if not one.runs or one.runs[-1][1] != shards:
                one.runs.append((one.steps_read, shards))
            one.steps_read += 1
            for shard, entry in reads.all.get(stream, {}).items():
                one.entries[shard] = (*one.entries.get(shard, ()), entry)[-2:]
                one.packed = None

    def trial_over(self) -> None:
        """Drop what a spare has read in its trial."""
        self.close_readers()

    # -- tracked
    def state_dict(self) -> dict[str, Any]:
        """Return positions and entries."""
        streams = []
        for one in self._streams:
            if one.packed is None:
                one.packed = msgspec.msgpack.encode(sorted(one.entries.items()))
            streams.append(
                {"steps_read": one.steps_read, "runs": [list(run) for run in one.runs], "entries": one.packed}
            )
        return {"sizes": list(self._sizes), "streams": streams}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`. Raises `UsageError` when it is of other sizes, or of another number of
        streams."""
        if list(state["sizes"]) != self._sizes or len(state["streams"]) != len(self._streams):
            raise UsageError(
                f"the training that goes on has read {len(state['streams'])} stream(s) in {state['sizes'][0]} data shards with micro-batches of "
                f"{state['sizes'][1]} samples; this script reads {len(self._streams)} in {self._sizes[0]} with {self._sizes[1]}.",
                remedy="keep global_batch_size, micro_batch_size and the calls of run.stream; or begin with another --checkpoint-dir.",
            )
        self._reads = None
        for one, known in zip(self._streams, state["streams"], strict=True):
            one.steps_read, one.packed = int(known["steps_read"]), bytes(known["entries"])
            one.runs = [(int(first), int(shards)) for first, shards in known["runs"]]
            one.entries = dict(msgspec.msgpack.decode(one.packed, type=list[tuple[int, tuple[ShardEntry, ...]]]))


def start_of(entries: Iterable[ShardEntry], position: int) -> ShardEntry | None:
    """Return the entry from which a reader goes to ``position``; None: from the beginning of the stream.

    It begins at the last entry but one, and so reads a micro-batch again whose digest is known. Where data have
    changed, that shows before anybody trains on them.
    """
    usable = [entry for entry in entries if entry.position <= position and entry.state]
    return usable[-2] if len(usable) > 1 else None
