"""Lives of a job on two to four trays, with all that the pieces can do together: each rank's shard is sealed in its
tray's arena, pushed to another tray, which verifies it, committed by the coordinator, written down on every tray,
flushed, collected, and restored by `choose` from arenas, copies and the disk; then healed. Ranks, agents, trays, the
coordinator and everybody die.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rackrun.agent.snapshots.mirror import verify
from rackrun.checkpoint.arena.arena import Arena
from rackrun.checkpoint.base.errors import CheckpointError, NoUsableCheckpoint
from rackrun.checkpoint.commit.checkpoint_choice import Holding, RestorePlan, ShardSource, Tier, choose
from rackrun.checkpoint.commit.commit_protocol import (
    CheckpointBegan,
    Commit,
    CommitPolicy,
    Committer,
    Confirmed,
    Deadline,
    Event,
    HolderJoined,
    HolderLost,
    MembershipBegan,
    Pinned,
    Repair,
    Retire,
    ShardSealed,
    Unpinned,
)
from rackrun.checkpoint.commit.commit_records import CommitRecord
from rackrun.checkpoint.durable.retention import Retention, collect
from rackrun.checkpoint.manager.checkpoint_sources import Sources, newest_records
from rackrun.protocol import crash_points
from tests.checkpoint.crash_job import Wrong
from tests.checkpoint.crash_stage import Fate, Killed
from tests.checkpoint.crash_tray import JOB, Duplicate, Tray, content, holding_at, sealed_by

POINTS = ("arena.", "replicate.", "commit.record", "durable.", "retention.")
PIECE = 9000
SAVES_MAX = 4
Work = Iterator[None]


class Trays:
    """All lives of the job over one folder, and what it may restore."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.folder, self.disk = folder, folder / "disk"
        self.disk.mkdir(parents=True)
        self.world = self.rng.randint(2, 4)
        self.life = self.number = 0
        self.trays = [Tray(index, self.world, folder, self.passes) for index in range(self.world)]
        self.committer: Committer | None = None
        self.fate = Fate(None, 0)
        self.story: deque[str] = deque(maxlen=8)
        self.works: list[tuple[str, Work]] = []
        # the model
        self.lives: dict[int, int] = {}
        """Checkpoint number -> the life that wrote it."""
        self.decided: set[int] = set()
        """Checkpoints that the coordinator has said are committed."""
        self.logged: dict[int, set[int]] = {}
        """Committed checkpoint number -> trays that have its record."""
        self.copies: dict[tuple[int, int], set[tuple[str, int]]] = {}
        """(checkpoint, owner) -> ("arena" or "copy", tray)."""
        self.on_disk = -1

    def passes(self, what: str) -> None:
        if self.fate.strikes(what):
            raise Killed

    @staticmethod
    def points() -> list[str]:
        return [name for name in crash_points.CRASH_POINTS if name.startswith(POINTS)]

    # -- a life
    def live(self) -> str:
        """Where fate struck; "": nowhere."""
        self.life += 1
        named = self.rng.random() < 0.5
        self.fate = Fate(
            self.rng.choice(self.points()) if named else None,
            self.rng.randint(1, 3) if named else self.rng.randint(1, 300),
        )
        self.works = []
        crash_points.enable(self.passes)
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                restored = self._play()
        except BaseException as error:
            error.add_note("\n".join([*self.story, f"life {self.life}: {vars(self.fate)}", said.getvalue()[-2000:]]))
            raise
        finally:
            crash_points.enable(None)
        self._die(restored)
        return self.fate.struck

    def _play(self) -> int | None:
        """Until fate strikes or enough is saved. What was restored."""
        restored: int | None = None
        try:
            self._recover()
            restored = self._restore()
        except Killed:
            return restored
        saves = self.rng.randint(1, SAVES_MAX)
        left = self.rng.randint(0, 40)
        while True:
            if not self.works and saves and not self.fate.struck:
                saves -= 1
                self._begin()
            if not self.works or (self.fate.struck and left == 0):
                return restored
            left -= bool(self.fate.struck)
            name, work = self.works[self.rng.randrange(len(self.works))]
            try:
                next(work)
            except StopIteration:
                self.works = [one for one in self.works if one[1] is not work]
            except Killed:
                self.works = [one for one in self.works if one[0] != name]
                self.dying = name

    def _die(self, restored: int | None) -> None:
        """Who dies; all ranks are started again."""
        for _, work in self.works:
            work.close()  # type: ignore[attr-defined]
        what = self.rng.choice(["rank", "agent", "tray", "coordinator", "everybody", "two trays"])
        trays = self.rng.sample(
            self.trays, {"rank": 0, "coordinator": 0, "everybody": self.world, "two trays": 2}.get(what, 1)
        )
        if not self.fate.struck:
            what, trays = "nobody", []
        if what == "two trays" and self.rng.random() < 0.8:
            what = "two agents"
        for tray in self.trays:
            tray.stop()
        for tray in trays:
            memory = "tray" in what
            tray.lose(memory=memory)
            self._forget("copy", tray.index)
            if memory:
                self._forget("arena", tray.index)
                for logged in self.logged.values():
                    logged.discard(tray.index)
                if self.committer is not None:
                    self.committer.handle(HolderLost(holder=tray.name))
        if what in ("coordinator", "everybody"):
            self.committer = None
        at = f"{self.fate.struck or 'nothing'}, {what} {[tray.index for tray in trays]} died"
        self.story.append(f"life {self.life}: restored {restored}, struck at {at}, floor {self.floor()}")

    def _forget(self, kind: str, tray: int) -> None:
        for places in self.copies.values():
            places.discard((kind, tray))

    # -- recovery
    def _recover(self) -> None:
        seen = [tray.start(self.life) for tray in self.trays]
        self.inventory = [
            holding_at(holding, tray) for tray, one in zip(self.trays, seen, strict=True) for holding in one.holdings
        ]
        self.inventory += [holding for tray in self.trays for holding, _ in tray.held()]
        self.durable = Sources(None, self.trays[0].store, rank=0, world=1)
        try:
            on_disk, records = self.durable.on_disk(set(seen[0].durable))
        finally:
            self.durable.close()
        self.records = newest_records([*records, *(record for one in seen for record in one.records)])
        if self.committer is None:
            logged = {record.number: record for one in seen for record in one.records}
            self.committer = Committer(CommitPolicy(copies=2), [logged[n] for n in sorted(logged)][-2:])
        self.committer.handle(MembershipBegan(fencing_token=self.life, owners=tuple(range(self.world))))
        for tray in self.trays:
            holds = [sealed_by(holding) for holding in self.inventory if holding.holder == tray.name]
            self._tell(HolderJoined(holder=tray.name, domain=tray.name, holds=tuple(holds)))
        self.inventory += on_disk
        self.number = max([self.number, *(one.newest_number for one in seen)])

    def floor(self) -> int:
        """What a restore must not fall behind."""
        newest = max((n for n, trays in self.logged.items() if trays), default=-1)
        if newest >= 0 and all(self.copies.get((newest, owner)) for owner in range(self.world)):
            return max(newest, self.on_disk)
        return self.on_disk

    def _restore(self) -> int | None:
        while True:
            try:
                plan = choose(self.inventory, self.records)
            except NoUsableCheckpoint as error:
                if self.floor() >= 0:
                    raise Wrong(f"older: checkpoint {self.floor()} was committed") from error
                self._begin_anew()
                return None
            bad = self._read(plan)
            if bad is None:
                break
            self.inventory.remove(bad)
        if plan.number < self.floor():
            raise Wrong(f"older: checkpoint {plan.number}, {self.floor()} was committed; {plan.passed_over}")
        if plan.number not in self.decided:
            raise Wrong(f"unverified: checkpoint {plan.number} was never committed")
        return plan.number

    def _read(self, plan: RestorePlan) -> Holding | None:
        """All shards, each from its nearest source, and compared. What was bad."""
        for owner, sources in plan.sources.items():
            holding = self._holding(plan.number, owner, sources[0])
            try:
                data = self._bytes(holding)
            except CheckpointError:
                return holding
            if data != content(self.lives[plan.number], plan.number, owner):
                raise Wrong(f"torn: {holding}")
        return None

    def _holding(self, number: int, owner: int, source: ShardSource) -> Holding:
        return next(
            h for h in self.inventory
            if (h.number, h.owner, h.holder, h.tier) == (number, owner, source.holder, source.tier)
        )  # fmt: skip

    def _bytes(self, holding: Holding) -> bytes:
        if holding.tier is Tier.SHARED:
            with self.trays[0].store.open(holding.number) as reader:
                return bytes(reader.read(holding.owner, 0, reader.reader(holding.owner).size))
        tray = next(tray for tray in self.trays if tray.name == holding.holder)
        if holding.tier is Tier.OWN_TRAY:
            shard = tray.arena.reader(holding.number)
            return b"".join(bytes(shard.chunk(index)) for index in range(len(shard.crcs)))
        fd = next(fd for held, fd in tray.held() if held == holding)
        with Arena.attach(fd, job=JOB) as arena:
            shard = arena.reader(holding.number, owner=holding.owner)
            return b"".join(bytes(shard.chunk(index)) for index in range(len(shard.crcs)))

    def _begin_anew(self) -> None:
        """Everything is lost: the job has begun again."""
        self.logged.clear()
        self.copies.clear()
        self.committer = Committer(CommitPolicy(copies=2))
        self.committer.handle(MembershipBegan(fencing_token=self.life, owners=tuple(range(self.world))))

    # -- a save
    def _begin(self) -> None:
        assert self.committer is not None
        for record in self.committer.committed.values():
            self._announce(record)  # who has come since
        if sum(any(self.copies.get((n, o)) for o in range(self.world)) for n in self.committer.keep()) > 1:
            return  # there is no room for another copy: the newer is healed and confirmed first
        self.number += 1
        n, step = self.number, self.life * 100 + self.number % 100
        self.lives[n] = self.life
        self.committer.handle(CheckpointBegan(number=n, step=step))
        keep = self.committer.keep()
        for tray in self.trays:
            self.works.append((f"save {tray.index}", self._save(tray, n, step, keep)))
        if self.rng.random() < 0.1:
            self.works.append(("coordinator", self._deadline(n)))

    def _deadline(self, n: int) -> Work:
        for _ in range(self.rng.randint(0, 60)):
            yield
        self._tell(Deadline(number=n))

    def _save(self, tray: Tray, n: int, step: int, keep: tuple[int, ...]) -> Work:
        data = content(self.life, n, tray.index)
        writer = tray.arena.begin(n, step, keep=keep)
        half = len(data) // 2
        writer.payload[:half] = data[:half]
        yield
        writer.payload[half : len(data)] = data[half:]
        if self.rng.random() < 0.03:
            writer.abandon()
            return
        writer.seal(len(data), f"layout {len(data)}")
        self.copies.setdefault((n, tray.index), set()).add(("arena", tray.index))
        yield
        self._sealed(tray, n, tray.index, tray.arena)
        yield
        holder = self.trays[(tray.index + 1) % self.world]
        yield from self._push(tray.index, n, lambda: tray.arena._file.fd, holder)

    def _push(self, owner: int, n: int, source: Callable[[], int], holder: Tray) -> Work:
        """The bytes as they are, in pieces; the holder verifies them before it keeps them."""
        assert self.committer is not None
        fd = -1
        try:
            size = os.fstat(source()).st_size
            fd = holder.copies.room(size)
            for at in range(0, size, PIECE):
                os.pwrite(fd, os.pread(source(), PIECE, at), at)
                yield
            try:
                verify(fd, n)
            except CheckpointError:
                return  # it has been overwritten meanwhile
            besides = self.committer.newest
            holder.copies.keep(str(owner), 0, 0, n, fd)
            holder.copies.prune(besides.number if besides else -1)
            with Arena.attach(fd, job=JOB) as arena:
                self.copies.setdefault((n, owner), set()).add(("copy", holder.index))
                fd = -1
                yield
                self._sealed(holder, n, owner, arena)
        finally:
            if fd >= 0 and fd not in {kept for _, kept in holder.held()}:
                os.close(fd)

    def _sealed(self, holder: Tray, n: int, owner: int, arena: Arena) -> None:
        info = next((one for one in arena.slots() if one.number == n and one.manifest_digest), None)
        if info is not None:
            self._tell(
                ShardSealed(
                    number=n, step=info.step, fencing_token=info.fencing_token, owner=owner, holder=holder.name,
                    domain=holder.name,
                    digest=info.manifest_digest, layout_hash=info.layout_hash,
                )
            )  # fmt: skip

    # -- the coordinator
    def _tell(self, event: Event) -> None:
        assert self.committer is not None
        for output in self.committer.handle(event):
            if isinstance(output, Commit):
                n = output.record.number
                self.decided.add(n)
                if any(len({at for _, at in self.copies[n, owner]}) < 2 for owner in range(self.world)):
                    raise Wrong(f"unverified: checkpoint {n} was committed with too few copies")
                self._announce(output.record)
                if self.rng.random() < 0.4:
                    self.works.append(("flush", self._flush(output.record)))
            elif isinstance(output, Retire) and self.rng.random() < 0.5:
                for tray in self.trays:
                    self.works.append((f"release {tray.index}", self._release(tray, output.number)))
            elif isinstance(output, Repair):
                self.works.append((f"heal {output.to}", self._heal(output)))

    def _announce(self, record: CommitRecord) -> None:
        for tray in self.trays:
            self.works.append((f"commit {tray.index}", self._commit(tray, record)))

    def _commit(self, tray: Tray, record: CommitRecord) -> Work:
        n = record.number
        tray.folder.remember(record)
        self.logged.setdefault(n, set()).add(tray.index)
        yield
        with contextlib.suppress(NoUsableCheckpoint):
            tray.arena.commit(n)
        yield
        self._tell(Confirmed(number=n, holder=tray.name))

    def _release(self, tray: Tray, n: int) -> Work:
        yield
        with contextlib.suppress(CheckpointError):
            tray.arena.release(n)

    def _heal(self, heal: Repair) -> Work:
        """From wherever there is one."""
        yield
        to = next(tray for tray in self.trays if tray.name == heal.to)
        for tray in self.trays:
            for holding, fd in tray.held():
                if (holding.number, holding.owner) == (heal.number, heal.owner) and tray is not to:
                    with contextlib.closing(Duplicate(fd)) as source:
                        yield from self._push(heal.owner, heal.number, lambda source=source: source.fd, to)  # type: ignore[misc]
                    return
        owner = self.trays[heal.owner]
        if owner is not to and any(info.number == heal.number and info.manifest_digest for info in owner.arena.slots()):
            yield from self._push(heal.owner, heal.number, lambda: owner.arena._file.fd, to)

    # -- the durable tier
    def _flush(self, record: CommitRecord) -> Work:
        """Each shard from its owner, or from who holds a copy; any rank finishes."""
        assert self.committer is not None
        committer, n = self.committer, record.number
        committer.handle(Pinned(number=n, by="flush"))
        writer = self.rng.choice(self.trays).store.writer(n, record.step, record.fencing_token, self.world)
        written = 0
        for owner in range(self.world):
            yield
            written += self._flush_shard(writer, n, owner)
        committer.handle(Unpinned(number=n, by="flush"))
        if written == self.world and writer.finish():
            self.on_disk = max(self.on_disk, n)
            yield
            collect(self.trays[0].store, Retention(2), fencing_token=self.life, now=lambda: 1e12, orphan_ttl_s=100.0)

    def _flush_shard(self, writer: Any, n: int, owner: int) -> bool:
        copies = [fd for tray in self.trays for h, fd in tray.held() if (h.number, h.owner) == (n, owner)]
        with contextlib.ExitStack() as opened:
            arenas = [self.trays[owner].arena] if self.rng.random() < 0.7 else []
            arenas += [opened.enter_context(Arena.attach(fd, job=JOB)) for fd in copies]  # as for a dead owner
            for arena in arenas:
                with contextlib.suppress(CheckpointError), arena.lease(n):
                    reader = arena.reader(n, owner=owner)
                    if writer.write_shard(
                        owner, reader, reader.layout_hash, reader.crcs, chunk_bytes=arena.chunk_bytes
                    ):
                        return True
        return False

    # -- between lives
    def mishap(self) -> str:
        """A bit is flipped, in the newest image of an arena or in a copy."""
        if self.rng.random() > 0.08:
            return ""
        tray = self.rng.choice(self.trays)
        images = [(path, ("arena", tray.index), tray.index) for path in tray.base.glob("rackrun-*/*/*.arena")]
        images += [(Path(f"/proc/self/fd/{fd}"), ("copy", tray.index), held.owner) for held, fd in tray.held()]
        if not images:
            return ""
        path, place, owner = self.rng.choice(images)
        with path.open("r+b") as file:
            with Arena.attach(file.fileno(), job=JOB) as arena:
                sealed = [info for info in arena.slots() if info.manifest_digest and info.payload_bytes]
                if not sealed:
                    return ""
                newest = max(sealed, key=lambda info: info.number)
                at = arena._superblock.geometry.payload_at(newest.index) + self.rng.randrange(newest.payload_bytes)
            byte = os.pread(file.fileno(), 1, at)[0] ^ (1 << self.rng.randrange(8))
            os.pwrite(file.fileno(), bytes([byte]), at)
        self.copies.get((newest.number, owner), set()).discard(place)
        self.story.append(f"bit flipped in checkpoint {newest.number}, {place} of rank {owner}")
        return "bit flipped"

    def close(self) -> None:
        for tray in self.trays:
            tray.stop()
            tray.copies.close()
