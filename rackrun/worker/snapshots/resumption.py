"""Resumes a job from a checkpoint on disk: all ranks agree on the newest that every rank can read, and fill their
tensors from it.

Each rank reads the shards that hold parts of its tensors. A checkpoint that was resumed from several times, with no
newer one finished since, may itself be what ends the job. It is passed over, like one that was quarantined
(`rackrun.checkpoint.durable.probation`); rank 0 prints which.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import msgspec
import torch

from rackrun.checkpoint.base.errors import (
    CheckpointError,
    IntegrityError,
    LayoutMismatch,
    NoUsableCheckpoint,
    is_damage,
)
from rackrun.checkpoint.durable.durable_reader import CheckpointReader
from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.checkpoint.durable.probation import Probation
from rackrun.checkpoint.image.image_layout import PLAIN, ImageLayout, TensorEntry, read_layout
from rackrun.errors import DirectoryRefused, StateLost
from rackrun.protocol.ids import Position
from rackrun.worker.device.numerics import unlike
from rackrun.worker.membership.worker_membership import WorkerMembership
from rackrun.worker.process.reports import say
from rackrun.worker.restore.refill import Refill, check_alike
from rackrun.worker.state.state_image import manifest_in
from rackrun.worker.state.state_manifest import StateManifest, TurnResults
from rackrun.worker.state.tracked_state import TrackedState

__all__ = ["Resumption", "refuse_other_training", "say"]


class Resumption:
    """One attempt of all ranks to resume. ``facts``: settings that must equal those of the checkpoint's run."""

    def __init__(self, world: WorkerMembership, state: TrackedState, store: DurableStore, facts: str) -> None:
        self._world, self._state, self._store, self._facts = world, state, store, facts
        self._probation = Probation(store.directory, store.files)
        self.results = TurnResults()
        """What the last calls of the loop had returned, from the checkpoint that is used."""
        self.not_used: list[int] = []
        """Checkpoints that are newer than the one that was used."""
        self._unfit: dict[int, tuple[str, str]] = {}
        """Checkpoints that do not fit what this script tracks: why, and what to do."""
        self._to_tell: list[str] = []
        """Notices about checkpoints of ``_unfit`` that are not printed yet: the error may say the same of all."""
        self._unusable: dict[int, tuple[str, bool]] = {}
        """Checkpoints that exist but that some rank could not open: why, and whether they are damaged."""

    def run(self, refused: tuple[str, str] | None = None) -> tuple[Position | None, int]:
        """Fill the state from the newest checkpoint that all ranks can read and that was not resumed from in vain too
        often. Collective, before the first step.

        Returns its position, None if there is no checkpoint yet, and a number that is larger at every start.
        ``refused``: why this rank may not use the directory, and what to do; it counts for all ranks. Raises
        `StateLost` when there are checkpoints and none can be used, and `DirectoryRefused` when the directory is
        refused, is of another training, or is not shared by all ranks.
        """
        if refusal := next((why for why in self._gather(refused) if why), None):
            raise DirectoryRefused(refusal[0], remedy=refusal[1])
        mine, unusable, used = (
            self._list_usable()
        )  # only once the directory is this job's: another may have been writing
        listed = self._gather([found[0] for found in mine])
        self._find_by_name({number for theirs in listed for number in theirs}, mine, unusable)
        barred = self._probation.barred() if self._world.rank == 0 else {}
        everyone = self._gather((max(time.time_ns() // 1_000_000, used + 1), mine, barred, unusable))
        life, barred = max(at for at, *_ in everyone), everyone[0][2]
        seen = [theirs for _, theirs, *_ in everyone]
        common: list[int] = [found[0] for found in mine if all(found in theirs for theirs in seen)]
        for number in {found[0] for theirs in seen for found in theirs} - {*common}:
            self._unusable[number] = ("the ranks do not see it alike: some see none, or another.", False)
        for *_, theirs in everyone:
            self._unusable = {number: tuple(why) for number, why in theirs.items()} | self._unusable
        if not common and any(seen) and not any(theirs for *_, theirs in everyone):
            raise DirectoryRefused(
                f"the ranks see different checkpoints in {self._store.directory}: {sum(not theirs for theirs in seen)} of {len(seen)} see none.",
                remedy="give a directory that all hosts share, and see that it is mounted on all of them.",
            )
        there = sorted({*common, *self._unusable}, reverse=True)
        position = self._first_usable(there, barred)
        if position is None and self._unfit and self._unfit.keys() >= {*there} - barred.keys():
            what, remedy = self._unfit[max(self._unfit)]
            if len({*self._unfit.values()}) > 1:
                self._tell_unfit()
            raise DirectoryRefused(
                f"no checkpoint in {self._store.directory} fits what this script tracks: {what}",
                remedy=f"{remedy.rstrip('.')}; or give another --checkpoint-dir to begin anew.",
            )
        self._tell_unfit()
        if there and position is None:
            raise StateLost(
                f"none of {len(there)} checkpoints in {self._store.directory} can be {_story(barred, there)}.",
                remedy="see what is said above, and why the job ended after them; let one be taken again with "
                "`rackctl ckpt quarantine DIR NUMBER --lift`, or give another --checkpoint-dir to begin anew.",
            )
        return position, life

    def _list_usable(self) -> tuple[list[list[Any]], dict[int, list[Any]], int]:
        """Return what this rank sees: [number, digest] of each usable checkpoint; for each other one why it cannot be
        used and whether it is damaged; and the largest number of a start that has written one, as a host's clock may
        have been ahead."""
        try:
            self._store.files.make_root(self._store.root)
            self._store.complete()
            whole, left_out = self._store.look()
        except (OSError, CheckpointError) as error:
            raise DirectoryRefused(
                f"the checkpoint directory {self._store.root} cannot be used: {error}.",
                remedy="give one that all ranks can read and write.",
            ) from error
        mine = [[info.number, info.digest] for info in whole]
        used = max((info.fencing_token for info in whole), default=-1)
        return mine, {number: [_told(why), is_damage(why)] for number, why in left_out.items()}, used

    def _find_by_name(self, listed: set[int], mine: list[list[Any]], unusable: dict[int, list[Any]]) -> None:
        """Look for checkpoints by name that another rank has listed and this one has not: a host's listing of a shared
        directory may be seconds old."""
        for number in sorted(listed - {found[0] for found in mine} - set(unusable), reverse=True):
            try:
                mine.append([number, self._store.whole(number)[1]])
            except NoUsableCheckpoint:
                continue
            except CheckpointError as error:
                unusable[number] = [_told(error), is_damage(error)]

    def _first_usable(self, there: list[int], barred: dict[int, str]) -> Position | None:
        """Return the position of the first checkpoint in ``there`` that can be used, or None: the same on all ranks.
        The resumption is recorded before any training follows."""
        for number in there:
            if number in barred:
                if self._world.rank == 0:
                    say(f"the checkpoint of step {number} is {barred[number]}")
                self.not_used.append(number)
                continue
            if number in self._unusable:
                self._pass_over(number, *self._unusable[number])
                continue
            if (position := self._try(number)) is not None:
                if self._world.rank == 0:
                    self._probation.restored(number)
                return position
        return None

    def _try(self, number: int) -> Position | None:
        """Fill the state from the checkpoint ``number``, and return its position; None if some rank could not read
        it."""
        problem, damaged, unfit, step, world_size, different = "", False, ("", ""), -1, 0, ""
        self.results = TurnResults()
        try:
            with self._store.open(number) as reader:
                step, world_size = reader.step, reader.world_size
                different = self._fill_from(reader)
        except CheckpointError as error:
            problem, damaged = _told(error), is_damage(error)
            unfit = (error.what, error.remedy) if isinstance(error, LayoutMismatch) else unfit
        told = self._gather((problem, damaged, different, unfit))
        said = [one for one in told if one[0]]
        if said:
            if all(one[3][0] for one in said):
                self._unfit[number] = tuple(said[0][3])
            self._pass_over(number, said[0][0], any(one[1] for one in said))
            return None
        if self._world.rank == 0:
            self._tell_unfit()
            ranks = "" if world_size == self._world.size else f", which {world_size} ranks have written"
            say(f"resumed after step {step}, from {self._store.path(number)}{ranks}")
            self._say_unlike([one[2] for one in told])
        return Position(step)

    def _say_unlike(self, told: list[str]) -> None:
        """Print each difference in numerics once. ``told``: of each rank, from
        `rackrun.worker.device.numerics.unlike`."""
        for different in dict.fromkeys(filter(None, told)):
            say(
                f"rank {told.index(different)} goes on from a state that was computed with {different}: the same bits as without a stop are not promised"
            )

    def _pass_over(self, number: int, why: str, damaged: bool) -> None:
        """Record that a checkpoint is not used. A damaged one stays damaged and is quarantined, so that it does not
        outlive a good one as one of the newest. One that storage failed to deliver may be intact."""
        self.not_used.append(number)
        if self._world.rank == 0:
            by_itself = " The job takes an older one instead, if there is one, and never this one again."
            notice = f"the checkpoint of step {number} is not used: {why}" + (by_itself if damaged else "")
            if number in self._unfit and not damaged:
                self._to_tell.append(notice)
                return
            say(notice)
            if damaged:
                self._probation.quarantine(number, f"damaged: {why}")

    def _tell_unfit(self) -> None:
        """Print, once, why checkpoints do not fit what the script tracks."""
        for notice in self._to_tell:
            say(notice)
        self._to_tell.clear()

    def _fill_from(self, reader: CheckpointReader) -> str:
        """Fill the state from ``reader``, and return how the numerics there differ from this rank's
        (`rackrun.worker.device.numerics.unlike`). Raises `DirectoryRefused` for other ``facts``."""
        layouts = [read_layout(shard.read, shard.size) for shard in map(reader.reader, range(reader.world_size))]
        rank, same = self._world.rank, reader.world_size == self._world.size
        own = rank if same else 0
        manifest = manifest_in(_plain_in(reader, own, layouts[own]))
        _check_facts(manifest, self._facts, reader)
        self.results = manifest.lineage.results
        holders = manifest.lineage.kin or (own,)  # other tensors are held by its replicas
        if not same:
            holders = tuple(range(reader.world_size))
            manifests = (manifest_in(_plain_in(reader, rank, layout)) for rank, layout in enumerate(layouts))
            check_alike(manifests, f"the {reader.world_size} ranks that wrote {reader.directory}")

        def source(path: str, target: TensorEntry) -> int | None:
            # this rank's own; in a world of another size rank 0's, for all ranks
            first = same or self._state.is_buffer(path)
            return own if first and layouts[own].by_name.get(target.name) == target else None

        Refill(self._state, manifest, rank, layouts, holders, source).run(reader.read)
        return unlike(manifest.numerics, self._world.device)

    def _gather(self, mine: Any) -> list[Any]:
        """Return the plain data ``mine`` of every rank, in rank order."""
        encoded = torch.frombuffer(bytearray(msgspec.msgpack.encode(mine)), dtype=torch.uint8)
        sizes = [int(row.item()) for row in self._gather_rows(torch.tensor([encoded.numel()]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: encoded.numel()] = encoded
        rows = self._gather_rows(padded)
        return [msgspec.msgpack.decode(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def _gather_rows(self, mine: torch.Tensor) -> list[torch.Tensor]:
        return self._world.groups[0].gather_on_host(mine)


def refuse_other_training(store: DurableStore, facts: str) -> None:
    """Raise `DirectoryRefused` when the newest checkpoint is of a run with other ``facts``. One that cannot be read says
    nothing here: all ranks look at it together when they resume."""
    with contextlib.suppress(OSError, CheckpointError):
        barred = Probation(store.directory, store.files).barred()
        usable = [info.number for info in store.look()[0] if info.number not in barred]
        if not usable:
            return
        with store.open(max(usable)) as reader:
            shard = reader.reader(0)
            manifest = manifest_in(_plain_in(reader, 0, read_layout(shard.read, shard.size)))
            _check_facts(manifest, facts, reader)


def _check_facts(manifest: StateManifest, facts: str, reader: CheckpointReader) -> None:
    if manifest.lineage.facts != facts:
        raise DirectoryRefused(
            f"{reader.directory} is of a run with {manifest.lineage.facts}; this one has {facts}.",
            remedy="resume with the same, or give another --checkpoint-dir to begin anew.",
        )


def _plain_in(reader: CheckpointReader, rank: int, layout: ImageLayout) -> bytes:
    if PLAIN not in layout.extents:
        raise IntegrityError(
            f"the shard of rank {rank} in {reader.directory} has no state that is not tensors.",
            remedy="it was not written by an elastic job: give another --checkpoint-dir.",
        )
    return bytes(reader.read(rank, *layout.extents[PLAIN]))


def _story(barred: dict[int, str], common: list[int]) -> str:
    told = "; ".join(f"step {number} is {barred[number]}" for number in common if number in barred)
    return f"used: {told}" if told else "read"


def _told(error: CheckpointError) -> str:
    """Return why a checkpoint is not used. What to do about a damaged one is left out: the job does it."""
    return error.what if is_damage(error) else str(error)
