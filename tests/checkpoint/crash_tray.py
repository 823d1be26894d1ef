"""One host of `crash_trays`: its memory, its agent with the copies of others' shards, and one rank."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rackrun.agent.snapshots.mirror import SnapshotCopies
from rackrun.checkpoint.arena.arena import Arena, SlotState
from rackrun.checkpoint.arena.arena_folder import ArenaFolder, MemoryTier
from rackrun.checkpoint.base.process_identity import end_session
from rackrun.checkpoint.commit.checkpoint_choice import Holding, Tier
from rackrun.checkpoint.commit.commit_records import ShardSealed
from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.checkpoint.manager.checkpoint_sources import RestorableData, Sources
from rackrun.protocol.boot import SNAPSHOT_JOB as JOB
from tests.checkpoint.crash_stage import Killed
from tests.checkpoint.storage import Hooked

__all__ = ["JOB", "Duplicate", "Tray", "content", "holding_at", "sealed_by"]

SLOTS, ROOM, CHUNK = 3, 6000, 2048


def content(life: int, number: int, owner: int) -> bytes:
    order = random.Random(f"{life} {number} {owner}")
    return order.randbytes(order.randint(1, ROOM))


class _Files(Hooked):
    def __init__(self, passes: Callable[[str], None]) -> None:
        self._passes = passes

    def around(self, operation: str, real: Callable[..., Any], *args: Any) -> Any:
        if operation != "close":
            try:
                self._passes(operation)
            except Killed:
                if operation == "write":
                    real(args[0], args[1][: len(args[1]) // 2])
                raise
        return real(*args)


class Tray:
    """A host: its memory, its agent with the copies of others' shards, and one rank."""

    def __init__(self, index: int, world: int, folder: Path, passes: Callable[[str], None]) -> None:
        self.index, self._world = index, world
        self.base, self._disk = folder / f"tray-{index}", folder / "disk"
        self.base.mkdir()
        self.store = DurableStore(self._disk, JOB, files=_Files(passes))
        self.copies = SnapshotCopies()
        self.folder: ArenaFolder
        self.arena: Arena

    # -- its processes
    def start(self, fencing_token: int) -> RestorableData:
        """The agent says what it has; the rank begins to write."""
        self.folder = ArenaFolder(MemoryTier(self.base), JOB, self._disk, self.index, self._world)
        sources = Sources(self.folder, self.store, rank=self.index, world=self._world)
        try:
            seen = sources.look()
        finally:
            sources.close()
        attached = [
            arena for path in self.folder.arenas() if (arena := self.folder.attach(path, fencing_token)) is not None
        ]
        whole = {holding.number for holding in seen.holdings}
        if attached:
            self.arena = attached[0]
            for info in self.arena.slots():
                if info.state in (SlotState.SEALED, SlotState.COMMITTED) and info.number not in whole:
                    self.arena.mark_bad(info.number, "it is not what was sealed")
        else:
            name = self.folder.path / f"rank-{self.index:05d}-of-{self._world:05d}-{fencing_token}-0.arena"
            self.arena = Arena.create(
                name,
                job=JOB,
                rank=self.index,
                fencing_token=fencing_token,
                slots=SLOTS,
                payload_bytes=ROOM,
                chunk_bytes=CHUNK,
            )
        return seen

    def stop(self) -> None:
        """The rank is gone, as the kernel leaves it."""
        for name in ("arena", "folder"):
            thing = self.__dict__.pop(name, None)
            if thing is not None:
                end_session(thing._me)
            if isinstance(thing, Arena):
                thing._file.close()

    def lose(self, *, memory: bool) -> None:
        """The agent is gone, or the whole host."""
        self.stop()
        self.copies.close()
        if memory:
            shutil.rmtree(self.base)
            self.base.mkdir()

    # -- what it holds
    @property
    def name(self) -> str:
        return f"tray {self.index}"

    def held(self) -> list[tuple[Holding, int]]:
        """The copies that its agent keeps, with their descriptors."""
        found = []
        for owner, steps in self.copies._held.items():
            for step, fd in steps.items():
                with Arena.attach(fd, job=JOB) as arena:
                    info = next(info for info in arena.slots() if info.number == step and info.manifest_digest)
                holding = Holding(
                    number=step, step=info.step, fencing_token=info.fencing_token, owner=int(owner.tray),
                    holder=self.name,
                    domain=self.name, tier=Tier.PEER_TRAY, digest=info.manifest_digest, layout_hash=info.layout_hash,
                    verified=True,
                )  # fmt: skip
                found.append((holding, fd))
        return found


class Duplicate:
    """Of a descriptor: it outlives its keeper's."""

    def __init__(self, fd: int) -> None:
        self.fd = os.dup(fd)

    def close(self) -> None:
        os.close(self.fd)


def holding_at(holding: Holding, tray: Tray) -> Holding:
    """By the tray's name."""
    fields = {name: getattr(holding, name) for name in holding.__struct_fields__}
    return Holding(**{**fields, "holder": tray.name, "domain": tray.name})


def sealed_by(holding: Holding) -> ShardSealed:
    return ShardSealed(
        number=holding.number, step=holding.step, fencing_token=holding.fencing_token, owner=holding.owner,
        holder=holding.holder,
        domain=holding.domain, digest=holding.digest, layout_hash=holding.layout_hash,
    )  # fmt: skip
