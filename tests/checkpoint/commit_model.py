"""A small world around the coordinator's `Committer`, and a search through all that can happen in it.

Two trays, each with an agent (the holder) and a rank; every shard is written into the rank's own tray and pushed to the
other. Two slots per shard and holder. One connection's messages keep an order, everything else happens in any; what is
delivered and what is crashed when is the search's choice. Slots are torn while they are written. The log, the fencing
token and the counter of checkpoints survive the coordinator; a tray's memory does not survive its holder.

Coordinators are interned: a transition (coordinator, event) is computed once, so a state is a tuple of small values.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rackrun.checkpoint.commit.checkpoint_choice import Holding, Tier, choose
from rackrun.checkpoint.commit.commit_protocol import (
    Abandon,
    Begin,
    CheckpointBegan,
    Commit,
    CommitPolicy,
    CommitRecord,
    Committer,
    Confirmed,
    Deadline,
    Disagreement,
    Event,
    HolderJoined,
    HolderLost,
    MembershipBegan,
    Output,
    Repair,
    Retire,
    ShardSealed,
    UnderReplicated,
)  # fmt: skip

RANKS = HOLDERS = (0, 1)
NAMES = ("A", "B")
FREE, WRITING, SEALED, COMMITTED = range(4)
FAULTS = ("holder 0", "holder 1", "rank 0", "rank 1", "coordinator", "deadline")


class Slot(NamedTuple):
    state: int = FREE
    number: int = 0
    fencing_token: int = 0
    keep: tuple[int, ...] = ()
    """While it is written: what the push must spare in its turn."""

    @property
    def which(self) -> tuple[int, int]:
        return self.number, self.fencing_token


class World(NamedTuple):
    coordinator: int | None
    log: tuple[int, ...] = ()
    """Indices of records."""
    number: int = 0
    fencing_token: int = 1
    slots: tuple[tuple[Slot, Slot], ...] = ((Slot(), Slot()),) * 4
    """Of (holder, owner), at ``2 * holder + owner``."""
    begins: tuple[tuple[Any, ...], ...] = ((), ())
    """To each rank: (checkpoint, fencing token, keep)."""
    pushes: tuple[tuple[Any, ...], ...] = ((),) * 4
    """To (holder, owner): (checkpoint, fencing token, keep)."""
    inbox: tuple[frozenset[tuple[str, int, int, int]], ...] = (frozenset(),) * 2
    """From each holder to the coordinator, the smallest first: ("sealed", place, checkpoint, fencing token),
    ("confirmed", ...)."""
    outbox: tuple[frozenset[tuple[str, int]], ...] = (frozenset(),) * 2
    """From the coordinator to each holder, the smallest first: ("commit", index of the record), ("retire",
    checkpoint)."""
    faults: int = 1
    unseen: tuple[str, ...] = ()
    """Crashes that the coordinator does not know of."""
    down: tuple[int, ...] = ()
    """Ranks that are not running."""
    tray_lost: bool = False


@dataclass
class Model:
    policy: CommitPolicy = field(default_factory=CommitPolicy)
    checkpoints: int = 3
    overlap: bool = False
    """Whether a checkpoint begins even where two are kept, so that it may find no slot."""
    faults: int = 1
    kinds: tuple[str, ...] = FAULTS
    committer: type[Committer] = Committer
    records: list[CommitRecord] = field(default_factory=list)
    states: int = 0
    most_committed: int = 0
    _coordinators: dict[Any, int] = field(default_factory=dict)
    _by_id: list[Committer] = field(default_factory=list)
    _steps: dict[Any, tuple[int, tuple[Output, ...]]] = field(default_factory=dict)
    _chosen: set[Any] = field(default_factory=set)

    # -- the search --

    def explore(self) -> None:
        """All reachable states, each checked. AssertionError with the way that leads to a wrong one."""
        start = self._start()
        came: dict[World, tuple[World, str] | None] = {start: None}
        stack = [start]
        while stack:
            world = stack.pop()
            moves = 0
            for name, after in self.moves(world):
                moves += 1
                if after not in came:
                    came[after] = (world, name)
                    wrong = self.violation(after)
                    assert wrong is None, f"{wrong}\n" + "\n".join(self._way(came, after))
                    stack.append(after)
            if not moves:
                wrong = self.unfinished(world)
                assert wrong is None, f"{wrong}\n" + "\n".join(self._way(came, world))
        self.states = len(came)

    @staticmethod
    def _way(came: dict[World, tuple[World, str] | None], world: World) -> list[str]:
        steps = []
        while before := came[world]:
            world, name = before
            steps.append(name)
        return steps[::-1]

    def _start(self) -> World:
        world = World(self._intern(self.committer(self.policy)), faults=self.faults)
        world = self.tell(world, MembershipBegan(fencing_token=1, owners=RANKS))
        for holder in HOLDERS:
            world = self.tell(world, HolderJoined(holder=NAMES[holder], domain=f"tray {holder}"))
        return world

    # -- what can happen next --

    def moves(self, w: World) -> Iterator[tuple[str, World]]:
        """While a slot is torn only its writer moves, or something breaks: for the rest, torn is as good as sealed
        later.

        That halves the space for each writer. Nothing that reads a slot (a commit, a push) does so before it is sealed.
        """
        writing = [move for rank in RANKS for move in self._write(w, rank, begin=False)]
        writing += [move for place in range(4) for move in self._push(w, place, begin=False)]
        yield from writing[:1]
        if w.faults:
            for fault in self.kinds:
                yield from self._fault(w._replace(faults=w.faults - 1), fault)
        if writing:
            return
        if w.coordinator is not None and w.number < self.checkpoints and self._may_begin(w):
            n = w.number + 1
            yield f"checkpoint {n} begins", self.tell(w._replace(number=n), CheckpointBegan(number=n, step=n))
        begins = [move for rank in RANKS for move in self._write(w, rank, begin=True)]
        begins += [move for place in range(4) for move in self._push(w, place, begin=True)]
        # Different slots, each written by one: once nothing can break any more their order makes no difference.
        yield from begins if w.faults or w.unseen or w.coordinator is None else begins[:1]
        for h in HOLDERS:
            for told in [min(w.inbox[h])] if w.inbox[h] and w.coordinator is not None else []:
                event = _event(*told)
                yield f"delivered: {event}", self.tell(w._replace(inbox=_put(w.inbox, h, w.inbox[h] - {told})), event)
            for order in [min(w.outbox[h])] if w.outbox[h] else []:
                yield f"{NAMES[h]} reads {order}", self._read(w, h, order)
        yield from self._notice(w)

    def _may_begin(self, w: World) -> bool:
        assert w.coordinator is not None
        room = len(self._by_id[w.coordinator].keep()) < 2
        return (room or self.overlap) and not any(w.begins) and not w.unseen

    def _write(self, w: World, rank: int, *, begin: bool) -> Iterator[tuple[str, World]]:
        place = 2 * rank + rank
        if rank in w.down:
            return
        for i, slot in enumerate(w.slots[place]):
            healed = any(order[:2] == slot.which for order in w.pushes[place])
            if slot.state == WRITING and not healed and not begin:
                sealed = self._seal(w, place, i)
                push = (*slot.which, slot.keep)
                other = 2 * (1 - rank) + rank
                after = sealed._replace(pushes=_put(sealed.pushes, other, (*sealed.pushes[other], push)))
                yield f"rank {rank} seals {slot.number}", after
                return
        if begin and w.begins[rank]:
            (n, fencing_token, keep), *rest = w.begins[rank]
            after = w._replace(begins=_put(w.begins, rank, tuple(rest)))
            yield f"rank {rank} begins {n}, keeps {keep}", self._take_slot(after, place, n, fencing_token, keep)

    def _push(self, w: World, place: int, *, begin: bool) -> Iterator[tuple[str, World]]:
        if not w.pushes[place] or f"holder {place // 2}" in w.unseen:
            return
        (n, fencing_token, keep), *rest = w.pushes[place]
        done = w._replace(pushes=_put(w.pushes, place, tuple(rest)))
        source = any(s.state >= SEALED and s.which == (n, fencing_token) for s in w.slots[place ^ 2])
        writing = [i for i, s in enumerate(w.slots[place]) if s.state == WRITING and s.which == (n, fencing_token)]
        if writing and not begin:
            if not source:
                yield f"push of {n} of {place % 2} breaks off", _set_slot(done, place, writing[0], Slot())
            else:
                yield f"{NAMES[place // 2]} seals {n} of rank {place % 2}", self._seal(done, place, writing[0])
        elif begin and not writing:
            if any(s.state >= SEALED and s.which == (n, fencing_token) for s in w.slots[place]):
                begun = self._send(done, place // 2, ("sealed", place, n, fencing_token))
            else:
                begun = self._take_slot(w, place, n, fencing_token, keep) if source else w
            found = begun is not w
            yield f"{NAMES[place // 2]} begins {n} of rank {place % 2}, keeps {keep}", begun if found else done

    @staticmethod
    def _take_slot(w: World, place: int, n: int, fencing_token: int, keep: tuple[int, ...]) -> World:
        """`Arena.begin`: FREE or torn, else the oldest that is not kept and not the newest COMMITTED."""
        slots = w.slots[place]
        newest = max((s.number for s in slots if s.state == COMMITTED), default=None)
        usable = [
            ((s.state > WRITING) * 10 + s.number, i)
            for i, s in enumerate(slots)
            if s.state <= WRITING
            or not (s.number in keep or (s.state == COMMITTED and s.number == newest) or s.number >= n)
        ]
        return _set_slot(w, place, min(usable)[1], Slot(WRITING, n, fencing_token, keep)) if usable else w

    def _seal(self, w: World, place: int, index: int) -> World:
        slot = w.slots[place][index]._replace(state=SEALED, keep=())
        w = _set_slot(w, place, index, slot)
        return self._send(w, place // 2, ("sealed", place, *slot.which))

    def _read(self, w: World, h: int, order: tuple[str, int]) -> World:
        what, number = order
        w = w._replace(outbox=_put(w.outbox, h, w.outbox[h] - {order}))
        for place in (2 * h, 2 * h + 1):
            for i, slot in enumerate(w.slots[place]):
                if what == "commit":
                    record = self.records[number]
                    if slot == Slot(SEALED, record.number, record.fencing_token):
                        w = _set_slot(w, place, i, slot._replace(state=COMMITTED))
                elif slot.number == number and slot.state >= SEALED:
                    w = _set_slot(w, place, i, Slot())
        return self._send(w, h, ("confirmed", 2 * h, self.records[number].number, 0)) if what == "commit" else w

    def _fault(self, w: World, fault: str) -> Iterator[tuple[str, World]]:
        kind, _, index = fault.partition(" ")
        n = int(index or 0)
        if kind == "deadline" and w.coordinator is not None:
            for n in self._by_id[w.coordinator]._open:
                yield f"deadline of {n}", self.tell(w, Deadline(number=n))
        elif kind == "coordinator" and w.coordinator is not None:
            yield (
                "the coordinator crashes",
                w._replace(coordinator=None, inbox=(frozenset(),) * 2, outbox=(frozenset(),) * 2),
            )
        elif kind == "rank" and n not in w.down:
            yield (
                f"{fault} crashes",
                w._replace(unseen=(*w.unseen, fault), down=(*w.down, n), begins=_put(w.begins, n, ())),
            )
        elif kind == "holder" and fault not in w.unseen:
            empty = (Slot(), Slot())
            slots = tuple(empty if place // 2 == n else w.slots[place] for place in range(4))
            pushes = tuple(() if place // 2 == n else w.pushes[place] for place in range(4))
            yield f"{fault} crashes", w._replace(
                unseen=(*w.unseen, fault), down=(*w.down, n), begins=_put(w.begins, n, ()), slots=slots, pushes=pushes,
                outbox=_put(w.outbox, n, frozenset()), tray_lost=True,
            )  # fmt: skip

    def _notice(self, w: World) -> Iterator[tuple[str, World]]:
        if w.coordinator is None:
            fresh = w._replace(coordinator=self._intern(self.committer(self.policy, [self.records[i] for i in w.log])))
            fresh = self.tell(fresh, MembershipBegan(fencing_token=w.fencing_token, owners=RANKS))
            for h in HOLDERS:
                if f"holder {h}" in w.unseen:
                    continue
                held = [(place, slot) for place in (2 * h, 2 * h + 1) for slot in fresh.slots[place]]
                holds = tuple(_sealed(place, slot) for place, slot in held if slot.state >= SEALED)
                joined = HolderJoined(holder=NAMES[h], domain=f"tray {h}", holds=holds)
                fresh = self.tell(fresh, joined)
                records = frozenset(("commit", index) for index in w.log)
                fresh = fresh._replace(outbox=_put(fresh.outbox, h, records | fresh.outbox[h]))
            yield "the coordinator restarts", fresh
            return
        for fault in w.unseen:
            after = w._replace(
                unseen=tuple(f for f in w.unseen if f != fault),
                fencing_token=w.fencing_token + 1,
                begins=((), ()),
                down=(),
            )
            n = int(fault[-1])
            torn = 2 * n + n
            for i, slot in enumerate(after.slots[torn]):
                if slot.state == WRITING:
                    after = _set_slot(after, torn, i, Slot())
            if fault.startswith("holder"):
                after = self.tell(after._replace(inbox=_put(after.inbox, n, frozenset())), HolderLost(holder=NAMES[n]))
            after = self.tell(after, MembershipBegan(fencing_token=after.fencing_token, owners=RANKS))
            if fault.startswith("holder"):
                after = self.tell(after, HolderJoined(holder=NAMES[n], domain=f"tray {n}"))
            yield f"noticed: {fault}", after

    # -- the coordinator --

    def tell(self, w: World, event: Event) -> World:
        assert w.coordinator is not None
        if (w.coordinator, event) not in self._steps:
            after = _copied(self._by_id[w.coordinator])
            outputs = tuple(after.handle(event))
            self._steps[w.coordinator, event] = (self._intern(after), outputs)
        coordinator, outputs = self._steps[w.coordinator, event]
        w = w._replace(coordinator=coordinator)
        for output in outputs:
            w = self._do(w, output)
        return w

    def _do(self, w: World, output: Output) -> World:
        match output:
            case Begin():
                order = (output.number, output.fencing_token, output.keep)
                return w._replace(begins=tuple((*begins, order) for begins in w.begins))
            case Commit():
                if output.record not in self.records:
                    self.records.append(output.record)
                index = self.records.index(output.record)
                told = tuple(box | {("commit", index)} for box in w.outbox)
                return w._replace(log=(*w.log, index), outbox=told)
            case Retire():
                return w._replace(outbox=tuple(box | {("retire", output.number)} for box in w.outbox))
            case Repair():
                place = 2 * NAMES.index(output.to) + output.owner
                assert w.coordinator is not None
                coordinator = self._by_id[w.coordinator]
                fencing_token = coordinator.committed[output.number].fencing_token
                order = (output.number, fencing_token, coordinator.keep())
                index = next(i for i in w.log if self.records[i].number == output.number)
                h = place // 2
                return w._replace(
                    pushes=_put(w.pushes, place, (*w.pushes[place], order)),
                    outbox=_put(w.outbox, h, w.outbox[h] | {("commit", index)}),
                )
            case Abandon() | UnderReplicated() | Disagreement():
                return w

    def _send(self, w: World, h: int, told: tuple[str, int, int, int]) -> World:
        """What the coordinator would ignore it ignores for good (numbers and fencing tokens only grow), so it is not
        sent."""
        if w.coordinator is None or self.tell(w, _event(*told)) == w:
            return w
        return w._replace(inbox=_put(w.inbox, h, w.inbox[h] | {told}))

    def _intern(self, committer: Committer) -> int:
        key = tuple(
            frozenset(value.items()) if isinstance(value, dict) else value for value in vars(committer).values()
        )
        if key not in self._coordinators:
            self._coordinators[key] = len(self._by_id)
            self._by_id.append(committer)
        return self._coordinators[key]

    # -- what must hold --

    def violation(self, w: World) -> str | None:
        log = [self.records[i] for i in w.log]
        for i, record in enumerate(log):
            if i and not log[i - 1].number < record.number:
                return f"the log is not in order: {[r.number for r in log]}"
            if len({shard.owner for shard in record.shards}) != len(RANKS) or record.step != record.number:
                return f"checkpoint {record.number} is mixed or partial: {record}"
            wrong = [s for s in record.shards if s.digest != f"{s.owner} {record.number} {record.fencing_token}"]
            if wrong:
                return f"checkpoint {record.number} commits other bytes: {wrong}"
        for first, second in w.slots:
            if first.state and first.which == second.which:
                return f"one checkpoint in two slots: {first}, {second}"
        if not log or (w.tray_lost and all(record.degraded for record in log)):
            return None
        promise = self._promises(w, log)
        for lost in [None, *HOLDERS] if promise else [None]:
            usable = [r for r in log if self._available(w, r, lost)]
            if not usable:
                return f"no committed checkpoint is available without {lost}"
            if usable[-1] is not log[-1] and not log[-1].degraded:
                return f"the newest committed checkpoint {log[-1].number} is not available without {lost}"
        return self._reader_is_wrong(w, log)

    def _promises(self, w: World, log: list[CommitRecord]) -> bool:
        """Whether any one tray may be lost now: not while an earlier loss is not healed, nor before a full commit."""
        if all(record.degraded for record in log):
            return False
        if not w.tray_lost:
            return True
        if w.coordinator is None or w.unseen:
            return False
        committer = self._by_id[w.coordinator]
        assert committer.newest is not None
        return not committer._under.get(committer.newest.number)

    @staticmethod
    def _available(w: World, record: CommitRecord, lost: int | None) -> bool:
        return all(
            any(
                slot.state >= SEALED and slot.which == (record.number, record.fencing_token)
                for h in HOLDERS
                if h != lost
                for slot in w.slots[2 * h + owner]
            )
            for owner in RANKS
        )

    def _reader_is_wrong(self, w: World, log: list[CommitRecord]) -> str | None:
        """I2: what a restore takes is committed, whole and of one kind, and nothing newer was."""
        if (w.slots, w.log) in self._chosen:
            return None
        self._chosen.add((w.slots, w.log))
        plan = choose([_holding(p, s) for p, slots in enumerate(w.slots) for s in slots if s.state >= SEALED], log)
        expected = [r for r in log if self._available(w, r, None)][-1]
        if (plan.number, plan.fencing_token) != (expected.number, expected.fencing_token):
            return (
                f"a restore takes checkpoint {plan.number} of fencing token {plan.fencing_token}, not {expected.number}"
            )
        return None

    def unfinished(self, w: World) -> str | None:
        """Where nothing more can happen, not even after the deadlines: one checkpoint is left, the newest committed."""
        while w.coordinator is not None and (waiting := self._by_id[w.coordinator]._open):
            w = self.tell(w, Deadline(number=min(waiting)))
        if w.coordinator is None or not w.log:
            return "nothing is committed" if not self.kinds else None
        kept = self._by_id[w.coordinator].keep()
        self.most_committed = max(self.most_committed, len(w.log))
        if self.records[w.log[-1]].degraded:
            return None
        return None if kept == (self.records[w.log[-1]].number,) else f"still kept: {kept}"


def _put(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _event(what: str, place: int, n: int, fencing_token: int) -> Event:
    if what == "confirmed":
        return Confirmed(number=n, holder=NAMES[place // 2])
    return _sealed(place, Slot(SEALED, n, fencing_token))


def _set_slot(w: World, place: int, index: int, slot: Slot) -> World:
    return w._replace(slots=_put(w.slots, place, _put(w.slots[place], index, slot)))


def _sealed(place: int, slot: Slot) -> ShardSealed:
    h, owner = divmod(place, 2)
    return ShardSealed(
        number=slot.number, step=slot.number, fencing_token=slot.fencing_token, owner=owner, holder=NAMES[h],
        domain=f"tray {h}", digest=f"{owner} {slot.number} {slot.fencing_token}", layout_hash=f"layout {owner}",
    )  # fmt: skip


def _holding(place: int, slot: Slot) -> Holding:
    sealed = _sealed(place, slot)
    return Holding(
        number=sealed.number, step=sealed.step, fencing_token=sealed.fencing_token, owner=sealed.owner,
        holder=sealed.holder,
        domain=sealed.domain, digest=sealed.digest, layout_hash=sealed.layout_hash,
        tier=Tier.OWN_TRAY if place in (0, 3) else Tier.PEER_TRAY, verified=True,
    )  # fmt: skip


def _copied(committer: Committer) -> Committer:
    twin = copy.copy(committer)
    for name, value in vars(committer).items():
        setattr(twin, name, copy.copy(value))
    return twin
