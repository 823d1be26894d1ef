"""Restore: all ranks take the newest checkpoint for which every shard has a verified source.

Rank 0 chooses the checkpoint (`rackrun.checkpoint.commit.checkpoint_choice`) from what all ranks report. Each rank
fills its tensors from the nearest source: from its own shard where that has the boxes it needs, otherwise from all
shards (another world size, mesh or sharding). When a source turns out bad on one rank, all ranks choose again without
it, so they never mix steps.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rackrun.checkpoint.base.deprecation import warn_renamed
from rackrun.checkpoint.base.errors import (
    CheckpointError,
    IntegrityError,
    LayoutMismatch,
    NoUsableCheckpoint,
    is_damage,
)
from rackrun.checkpoint.base.messages import say
from rackrun.checkpoint.commit.checkpoint_choice import Holding, RestorePlan, Tier, choose
from rackrun.checkpoint.commit.peers import Peers
from rackrun.checkpoint.durable.probation import Probation
from rackrun.checkpoint.image.image_layout import PLAIN, ImageLayout, TensorEntry, read_layout
from rackrun.checkpoint.image.plain_part import Plain, decode_plain
from rackrun.checkpoint.image.reshard import fill, plan_from
from rackrun.checkpoint.image.tensor_entries import entries_of, locals_of
from rackrun.checkpoint.manager.checkpoint_sources import RestorableData, ShardBytes, Sources, newest_records
from rackrun.checkpoint.manager.user_state import Contents
from rackrun.protocol.crash_points import crash_point, register

__all__ = ["RestoreReport", "restore"]

register("restore.planned", "restore.filled", "restore.agreed", "restore.put")

_SECONDS = 600.0
_AT_ONCE = 8
"""How many checkpoints on disk are read at a time, newest first, until one can be taken."""


@dataclass(frozen=True)
class RestoreReport:
    """What was restored, as this rank saw it."""

    number: int
    """Number of the checkpoint."""
    step: int
    world_size: int
    """World size of the run that saved the checkpoint."""
    tiers: Mapping[int, str]
    """Shard (rank of the run that saved it) -> where this rank read it.

    ``own_tray`` is memory, ``shared`` is the directory.
    """
    bytes: int
    seconds: float
    values: Mapping[str, Any] = field(default_factory=dict)
    """Plain values by name. Prepared dicts and lists are also changed in place."""
    passed_over: Mapping[int, str] = field(default_factory=dict)
    """Number of a newer checkpoint -> why it was not taken. Rank 0 reports these on stderr too."""

    @property
    def generation(self) -> int:
        """Deprecated: ``number``."""
        warn_renamed("RestoreReport.generation", "number")
        return self.number


class _Plan(msgspec.Struct, frozen=True):
    """What rank 0 has chosen for one attempt."""

    plan: RestorePlan | None = None
    nothing: bool = False
    """True when nothing was ever committed."""
    problem: str = ""


class _Filled(msgspec.Struct, frozen=True):
    """How one attempt went on one rank."""

    failed: list[tuple[int, Tier]] = []
    """(owner, tier) of the shards that could not be read."""
    damaged: bool = False
    """True when bytes on disk are wrong."""
    problem: str = ""
    mismatch: str = ""
    """Why the prepared state does not fit what was saved; empty when it fits."""


def restore(
    contents: Contents, sources: Sources, seen: Sequence[RestorableData], peers: Peers, probation: Probation
) -> RestoreReport | None:
    """Fill ``contents`` from the newest usable checkpoint. Return a report; None when there is nothing to restore.

    Collective. ``seen``: what every rank reported; used on rank 0 only. Raises `NoUsableCheckpoint` on all ranks when
    there are checkpoints and none can be used. Raises `LayoutMismatch` on all ranks when the saved state does not fit;
    tensors may be partly overwritten then.
    """
    began = time.monotonic()
    chooser = _Chooser(sources, seen, probation) if peers.rank == 0 else None
    for attempt in itertools.count():
        mine = chooser.choose() if chooser is not None else None
        said = peers.hear_first(f"restore/{attempt}/plan", mine, _Plan, seconds=_SECONDS)
        if said.nothing:
            return None
        if said.plan is None:
            if chooser is not None:
                chooser.quarantine_damaged(above=-1)
            raise NoUsableCheckpoint(
                said.problem, remedy="bring a lost host back, or begin anew under another name of the job."
            )
        filling = _Filling(contents, sources, said.plan, peers.rank, peers.world_size)
        crash_point("restore.planned")
        filled = filling.run()
        crash_point("restore.filled")
        everyone = peers.gather(f"restore/{attempt}/filled", filled, seconds=_SECONDS)
        crash_point("restore.agreed")
        if mismatch := next((one.mismatch for one in everyone if one.mismatch), ""):
            raise LayoutMismatch(mismatch, remedy="build the state as it was saved, or give another directory.")
        if not any(one.problem for one in everyone):
            values = filling.finish()
            crash_point("restore.put")
            if chooser is not None:
                chooser.tell(said.plan)
            return RestoreReport(
                number=said.plan.number,
                step=said.plan.step,
                world_size=len(said.plan.sources),
                tiers={owner: shard.tier.name.lower() for owner, shard in sorted(filling.shards.items())},
                bytes=filling.bytes,
                seconds=time.monotonic() - began,
                values=values,
                passed_over=said.plan.passed_over,
            )
        if chooser is not None:
            chooser.without(said.plan.number, everyone)
    raise AssertionError


class _Chooser:
    """Chooses the checkpoint to restore. Exists on rank 0 only."""

    def __init__(self, sources: Sources, seen: Sequence[RestorableData], probation: Probation) -> None:
        self._sources, self._probation = sources, probation
        self._inventory: list[Holding] = [holding for one in seen for holding in one.holdings]
        self._records = newest_records(record for one in seen for record in one.records)
        self._left_out = {n: why for one in reversed(seen) for n, why in one.left_out.items()}
        self._damaged = {n for one in seen for n in one.damaged}
        """Checkpoints whose bytes on disk are damaged."""
        common = set(seen[0].durable).intersection(*(one.durable for one in seen))
        self._unread = sorted((number for number, _ in common), reverse=True)
        for number in {n for one in seen for n, _ in one.durable} - set(self._unread):
            self._left_out.setdefault(number, "the ranks do not see the same checkpoints on disk.")

    def choose(self) -> _Plan:
        """Choose a checkpoint. Checkpoints on disk are read until no unread one is newer than the choice."""
        while True:
            found = self._choose()
            if not self._unread or (found.plan is not None and found.plan.number > self._unread[0]):
                return found
            self._read_on()

    def _choose(self) -> _Plan:
        story = " ".join(_sentence(n, why) for n, why in self._left_out.items())
        if not self._records and not self._left_out:
            return _Plan(nothing=True)
        if not self._records:  # a new start from nothing would lose these checkpoints
            return _Plan(problem=f"no checkpoint can be read. {story}")
        quarantined, attempts = self._probation.quarantined(), self._probation.attempts()
        try:
            plan = choose(self._inventory, self._records, quarantined=quarantined, attempts=attempts)
        except CheckpointError as error:
            return _Plan(problem=f"{error.what} {story}".rstrip())
        passed_over = {n: why for n, why in self._left_out.items() if n > plan.number}
        for number, why in plan.passed_over.items():
            passed_over[number] = f"{why}: {passed_over[number]}" if number in passed_over else why
        return _Plan(msgspec.structs.replace(plan, passed_over=passed_over))

    def _read_on(self) -> None:
        now, self._unread = self._unread[:_AT_ONCE], self._unread[_AT_ONCE:]
        records = []
        for number in now:
            try:
                holdings, record = self._sources.look_into(number)
            except CheckpointError as error:
                self._leave_out(number, error.what, damaged=is_damage(error))
                continue
            self._inventory += holdings
            records.append(record)
        self._records = newest_records([*records, *self._records])

    def _leave_out(self, number: int, why: str, *, damaged: bool) -> None:
        self._left_out[number] = why
        if damaged:
            self._damaged.add(number)

    def without(self, number: int, everyone: Sequence[_Filled]) -> None:
        """Exclude the shards that could not be read from the next choice, and report why."""
        failed = {(number, *pair) for one in everyone for pair in one.failed}
        problems = sorted({one.problem for one in everyone if one.problem})
        for problem in problems:
            say(f"checkpoint {number}: {problem}")
        self._leave_out(number, " ".join(problems), damaged=any(one.damaged for one in everyone))
        self._inventory = [h for h in self._inventory if (h.number, h.owner, h.tier) not in failed]

    def tell(self, plan: RestorePlan) -> None:
        """Report on stderr why newer checkpoints were passed over, and quarantine those that are damaged."""
        for number, why in sorted(plan.passed_over.items()):
            what = f"checkpoint {number}" if number >= 0 else "the directory"
            say(f"{what} is not used: {why}")
        self.quarantine_damaged(above=plan.number)

    def quarantine_damaged(self, *, above: int) -> None:
        """Quarantine the damaged checkpoints newer than ``above``.

        Damage does not heal, and retention must not keep a damaged checkpoint in place of a good one. The checkpoint
        that was restored is not newer than ``above``, so it is spared when memory had it whole.
        """
        known = self._probation.quarantined()
        for number in sorted(self._damaged):
            if number > above and number not in known:
                self._probation.quarantine(number, f"damaged: {self._left_out.get(number, '')}")


def _sentence(number: int, why: str) -> str:
    return f"Checkpoint {number}: {why}" if number >= 0 else why


class _Filling:
    """One rank's part of one attempt to restore."""

    def __init__(self, contents: Contents, sources: Sources, plan: RestorePlan, rank: int, world_size: int) -> None:
        self._contents, self._sources, self._plan = contents, sources, plan
        self._world = len(plan.sources)
        self._own = rank % self._world
        self._rank, self._same = rank, self._world == world_size
        self.shards: dict[int, ShardBytes] = {}
        self.bytes = 0
        self._reading = self._own
        """The shard that is being read; errors are attributed to it."""
        self._layouts: dict[int, ImageLayout] = {}

    def run(self) -> _Filled:
        """Fill this rank's tensors, and return what failed. Raises nothing that other ranks have to learn of."""
        try:
            self._fill()
        except LayoutMismatch as error:
            return _Filled(problem=error.what, mismatch=error.what)
        except CheckpointError as error:
            owner = self._reading
            tiers = [self.shards[owner].tier] if owner in self.shards else [s.tier for s in self._plan.sources[owner]]
            damaged = Tier.SHARED in tiers and is_damage(error)
            return _Filled(failed=[(owner, tier) for tier in tiers], damaged=damaged, problem=error.what)
        return _Filled()

    def finish(self) -> dict[str, Any]:
        """Put the plain values into the prepared state, and return them by name."""
        return self._contents.put(self._plain, self._parts)

    def _fill(self) -> None:
        own = self._layout(self._own)
        self._plain = decode_plain(bytes(self._read(self._own, *own.extents[PLAIN])))
        saved = self._saved(own, self._plain)
        self._parts = self._contents.targets(self._plain, {name: entry for name, (_, entry) in saved.items()})
        wanted: dict[int | None, list[TensorEntry]] = {}
        for target in entries_of(self._parts):
            owner, entry = saved.get(target.name, (-1, None))
            wanted.setdefault(owner if entry == target else None, []).append(target)
        tensors = locals_of(self._parts)
        for fetches in plan_from(self._layout, wanted, range(self._world), turn=self._rank).values():
            fill(fetches, tensors, self._read)

    def _saved(self, own: ImageLayout, plain: Plain) -> dict[str, tuple[int, TensorEntry]]:
        """Return each tensor that this rank's shard consists of, with the shard that stores it.

        Replicas share the writing to disk, so another rank's shard may store it. Raises `IntegrityError` when it does
        not.
        """
        found = {name: (self._own, entry) for name, entry in own.by_name.items()}
        for name, owner in plain.elsewhere.items():
            entry = self._layout(owner).by_name.get(name) if owner in self._plan.sources else None
            if entry is None:
                raise IntegrityError(
                    f"the shard of rank {owner} does not have {name!r:.200}, which rank {self._own} has left to it.",
                    remedy="use another checkpoint.",
                )
            found[name] = owner, entry
        return found

    def _layout(self, owner: int) -> ImageLayout:
        if owner not in self._layouts:
            self._reading = owner
            self.shards[owner] = self._sources.shard(self._plan, owner)
            size = self.shards[owner].size
            self._layouts[owner] = read_layout(functools.partial(self._read, owner), size)
        return self._layouts[owner]

    def _read(self, owner: int, start: int, stop: int) -> memoryview:
        self._reading = owner
        self.bytes += stop - start
        return self.shards[owner].read(start, stop)
