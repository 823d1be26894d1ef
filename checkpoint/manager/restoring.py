"""One restore: all ranks take the newest generation for which every shard has a verified source, each from its nearest.

Rank 0 chooses (`rackrun.checkpoint.commit.checkpoint_choice`) from what all of them see; each fills its tensors, from its own shard where that
has its boxes, from all shards where they do not (another world size, mesh or sharding). When a source turns out bad on one
rank, all of them choose again without it: nobody ever mixes steps.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rackrun.checkpoint.base.errors import (
    CheckpointError,
    IntegrityError,
    LayoutMismatch,
    NoUsableGeneration,
    is_damage,
)
from rackrun.checkpoint.commit.checkpoint_choice import Holding, RestorePlan, Tier, choose
from rackrun.checkpoint.commit.peers import Peers
from rackrun.checkpoint.durable.probation import Probation
from rackrun.checkpoint.image.image_layout import PLAIN, ImageLayout, TensorEntry, header_bytes, parse_image
from rackrun.checkpoint.image.plain_part import Plain, decode_plain
from rackrun.checkpoint.image.reshard import Fetch, fill, plan_reshard
from rackrun.checkpoint.image.tensor_entries import entries_of, locals_of
from rackrun.checkpoint.image.user_state import Contents
from rackrun.checkpoint.manager.checkpoint_sources import Seen, ShardBytes, Sources, newest_records
from rackrun.protocol.crash_points import crash_point, register

__all__ = ["RestoreReport", "restore"]

register("restore.planned", "restore.filled", "restore.agreed", "restore.put")

_SECONDS = 600.0
_AT_ONCE = 8
"""Generations on disk are looked into, newest first, so many at a time: until one can be taken."""


@dataclass(frozen=True)
class RestoreReport:
    """What was restored, as this rank saw it."""

    generation: int
    step: int
    world_size: int
    """Of the run that saved it."""
    tiers: Mapping[int, str]
    """Shard (rank of that run) -> where this rank read it: ``own_tray`` is memory, ``shared`` is the directory."""
    bytes: int
    seconds: float
    values: Mapping[str, Any] = field(default_factory=dict)
    """Plain values by name. Dicts and lists that were prepared are changed in place too."""
    passed_over: Mapping[int, str] = field(default_factory=dict)
    """Newer generation -> why it was not taken. Rank 0 has said so on stderr too."""


class _Plan(msgspec.Struct, frozen=True):
    plan: RestorePlan | None = None
    nothing: bool = False
    """Nothing was ever committed."""
    problem: str = ""


class _Filled(msgspec.Struct, frozen=True):
    failed: list[tuple[int, Tier]] = []
    """(owner, where) of what could not be read."""
    damaged: bool = False
    """Bytes on disk are wrong."""
    problem: str = ""
    mismatch: str = ""
    """The state does not fit what was saved."""


def restore(
    contents: Contents, sources: Sources, seen: Sequence[Seen], peers: Peers, probation: Probation
) -> RestoreReport | None:
    """Collective; ``seen`` is every rank's, on rank 0. None: there is nothing to restore. Raises `NoUsableGeneration` on all ranks when there is something and
    none of it can be used, `LayoutMismatch` on all when it is of another state; tensors are torn then."""
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
            raise NoUsableGeneration(
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
                generation=said.plan.generation,
                step=said.plan.step,
                world_size=len(said.plan.sources),
                tiers={owner: shard.tier.name.lower() for owner, shard in sorted(filling.shards.items())},
                bytes=filling.bytes,
                seconds=time.monotonic() - began,
                values=values,
                passed_over=said.plan.passed_over,
            )
        if chooser is not None:
            chooser.without(said.plan.generation, everyone)
    raise AssertionError


class _Chooser:
    """On rank 0."""

    def __init__(self, sources: Sources, seen: Sequence[Seen], probation: Probation) -> None:
        self._sources, self._probation = sources, probation
        self._inventory: list[Holding] = [holding for one in seen for holding in one.holdings]
        self._records = newest_records(record for one in seen for record in one.records)
        self._left_out = {g: why for one in reversed(seen) for g, why in one.left_out.items()}
        self._damaged = {g for one in seen for g in one.damaged}
        """On disk."""
        common = set(seen[0].durable).intersection(*(one.durable for one in seen))
        self._unread = sorted((generation for generation, _ in common), reverse=True)
        for generation in {g for one in seen for g, _ in one.durable} - set(self._unread):
            self._left_out.setdefault(generation, "the ranks do not see the same generations on disk.")

    def choose(self) -> _Plan:
        """Of what is on disk so much is read that nothing newer than the plan's generation is left."""
        while True:
            found = self._choose()
            if not self._unread or (found.plan is not None and found.plan.generation > self._unread[0]):
                return found
            self._read_on()

    def _choose(self) -> _Plan:
        story = " ".join(_sentence(g, why) for g, why in self._left_out.items())
        if not self._records and not self._left_out:
            return _Plan(nothing=True)
        if not self._records:  # to begin anew would be to lose them
            return _Plan(problem=f"no generation can be read. {story}")
        quarantined, attempts = self._probation.quarantined(), self._probation.attempts()
        try:
            plan = choose(self._inventory, self._records, quarantined=quarantined, attempts=attempts)
        except CheckpointError as error:
            return _Plan(problem=f"{error.what} {story}".rstrip())
        passed_over = {g: why for g, why in self._left_out.items() if g > plan.generation}
        for generation, why in plan.passed_over.items():
            passed_over[generation] = f"{why}: {passed_over[generation]}" if generation in passed_over else why
        return _Plan(msgspec.structs.replace(plan, passed_over=passed_over))

    def _read_on(self) -> None:
        now, self._unread = self._unread[:_AT_ONCE], self._unread[_AT_ONCE:]
        records = []
        for generation in now:
            try:
                holdings, record = self._sources.look_into(generation)
            except CheckpointError as error:
                self._leave_out(generation, error.what, damaged=is_damage(error))
                continue
            self._inventory += holdings
            records.append(record)
        self._records = newest_records([*records, *self._records])

    def _leave_out(self, generation: int, why: str, *, damaged: bool) -> None:
        self._left_out[generation] = why
        if damaged:
            self._damaged.add(generation)

    def without(self, generation: int, everyone: Sequence[_Filled]) -> None:
        failed = {(generation, *pair) for one in everyone for pair in one.failed}
        problems = sorted({one.problem for one in everyone if one.problem})
        for problem in problems:
            print(f"rackrun: generation {generation}: {problem}", file=sys.stderr, flush=True)
        self._leave_out(generation, " ".join(problems), damaged=any(one.damaged for one in everyone))
        self._inventory = [h for h in self._inventory if (h.generation, h.owner, h.tier) not in failed]

    def tell(self, plan: RestorePlan) -> None:
        """Why it is not a newer one."""
        for generation, why in sorted(plan.passed_over.items()):
            what = f"generation {generation}" if generation >= 0 else "the directory"
            print(f"rackrun: {what} is not used: {why}", file=sys.stderr, flush=True)
        self.quarantine_damaged(above=plan.generation)

    def quarantine_damaged(self, *, above: int) -> None:
        """What is damaged stays so, and must not outlive a good one as one of the newest. One that memory had whole is not ``above``."""
        known = self._probation.quarantined()
        for generation in sorted(self._damaged):
            if generation > above and generation not in known:
                self._probation.quarantine(generation, f"damaged: {self._left_out.get(generation, '')}")


def _sentence(generation: int, why: str) -> str:
    return f"Generation {generation}: {why}" if generation >= 0 else why


class _Filling:
    """One rank's part of one attempt."""

    def __init__(self, contents: Contents, sources: Sources, plan: RestorePlan, rank: int, world_size: int) -> None:
        self._contents, self._sources, self._plan = contents, sources, plan
        self._world = len(plan.sources)
        self._own = rank % self._world
        self._rank, self._same = rank, self._world == world_size
        self.shards: dict[int, ShardBytes] = {}
        self.bytes = 0
        self._reading = self._own
        """The shard that is being read."""
        self._layouts: dict[int, ImageLayout] = {}

    def run(self) -> _Filled:
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
        return self._contents.put(self._plain, self._parts)

    def _fill(self) -> None:
        own = self._layout(self._own)
        self._plain = decode_plain(bytes(self._read(self._own, *own.extents[PLAIN])))
        saved = self._saved(own, self._plain)
        self._parts = self._contents.targets(self._plain, {name: entry for name, (_, entry) in saved.items()})
        targets, self._tensors = entries_of(self._parts), locals_of(self._parts)
        mine: dict[int, list[TensorEntry]] = {}
        others: list[TensorEntry] = []
        for target in targets:
            owner, entry = saved.get(target.name, (-1, None))
            (mine.setdefault(owner, []) if entry == target else others).append(target)
        for owner, of_one in mine.items():
            self._carry_out(plan_reshard([self._layout(owner)], of_one), [owner], of_one)
        if others:
            owners = range(self._world)
            layouts = [self._layout(owner) for owner in owners]
            self._carry_out(plan_reshard(layouts, others, turn=self._rank), owners, others)

    def _saved(self, own: ImageLayout, plain: Plain) -> dict[str, tuple[int, TensorEntry]]:
        """All that the rank of this shard had, and where it is: replicas share the writing to disk."""
        found = {name: (self._own, entry) for name, entry in own.by_name.items()}
        for name, owner in plain.elsewhere.items():
            entry = self._layout(owner).by_name.get(name) if owner in self._plan.sources else None
            if entry is None:
                raise IntegrityError(
                    f"the shard of rank {owner} does not have {name!r:.200}, which rank {self._own} has left to it.",
                    remedy="use another generation.",
                )
            found[name] = owner, entry
        return found

    def _carry_out(self, plan: list[Fetch], owners: Sequence[int], targets: Sequence[TensorEntry]) -> None:
        tensors = {target.name: self._tensors[target.name] for target in targets}
        fill(plan, tensors, lambda shard, start, stop: self._read(owners[shard], start, stop))

    def _layout(self, owner: int) -> ImageLayout:
        if owner not in self._layouts:
            self._reading = owner
            self.shards[owner] = self._sources.shard(self._plan, owner)
            size = self.shards[owner].size
            length = header_bytes(self._read(owner, 0, min(8, size)), limit=size)
            self._layouts[owner] = parse_image(self._read(owner, 0, length), limit=size)
        return self._layouts[owner]

    def _read(self, owner: int, start: int, stop: int) -> memoryview:
        self._reading = owner
        self.bytes += stop - start
        return self.shards[owner].read(start, stop)
