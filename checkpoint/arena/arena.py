"""The arena: one rank's memory for checkpoints, in a file on tmpfs or a memfd that outlives the process that writes.

An arena has slots, each with room for one image::

                begin               seal              commit
    FREE, BAD ---------> WRITING ---------> SEALED ---------> COMMITTED
                            | abandon          | release, mark_bad  |
                            +-> FREE           +--> FREE, BAD <-----+

A crash at any moment leaves every other slot unchanged, and this slot in a state that matches its content: the payload
is written first, then the chunk table, then the header. The newest committed image of each owner is never overwritten.

One process may write under one fencing token. A larger token fences the smaller ones, whose writers notice at their
next call. A fenced process cannot be stopped from storing into a slot that it has begun; such a slot stays out of use
until that process is dead. If the same user truncates the file between the check and the read, the reader gets SIGBUS.
A memfd is sealed against truncation.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Collection, Iterator

from rackrun.checkpoint.arena.arena_file import ArenaFile, change_points, lock, unlock
from rackrun.checkpoint.arena.arena_format import Geometry, Kind, SlotHeader, SlotState, Superblock
from rackrun.checkpoint.arena.arena_slot import SlotInfo, SlotReader, SlotWriter
from rackrun.checkpoint.base.digest import CHUNK_BYTES
from rackrun.checkpoint.base.errors import (
    CheckpointError,
    DuplicateOwner,
    IntegrityError,
    NoUsableCheckpoint,
    StaleFencingToken,
)
from rackrun.checkpoint.base.process_identity import NOBODY, ProcessIdentity, begin_session, end_session
from rackrun.checkpoint.commit.commit_records import NUMBER_MAX
from rackrun.checkpoint.host_memory.populate import BY_ITSELF, Populating
from rackrun.protocol.crash_points import crash_point, register

__all__ = ["Arena", "SlotInfo", "SlotReader", "SlotState", "SlotWriter"]

FENCING_TOKEN_MAX = STEP_MAX = 2**63 - 1
OWNER_MAX = 2**32 - 1
_PASSES_MAX = 100
_REUSED_FIRST = (SlotState.FREE, SlotState.BAD, SlotState.WRITING)

register("arena.begin.chosen")
change_points(
    "arena.attach", "arena.begin", "arena.abandon", "arena.commit", "arena.mark_bad", "arena.release", "arena.close"
)


class Arena:
    """One rank's slots for checkpoint images. Use `create` or `attach` to get one."""

    def __init__(self, file: ArenaFile, superblock: Superblock, me: ProcessIdentity | None) -> None:
        """Use `create` or `attach`."""
        self._file, self._superblock, self._me = file, superblock, me
        self._writers: list[SlotWriter] = []

    @classmethod
    def create(
        cls,
        path_or_fd: str | os.PathLike[str] | int,
        *,
        job: str,
        rank: int,
        fencing_token: int,
        slots: int,
        payload_bytes: int,
        chunk_bytes: int = CHUNK_BYTES,
        populating: Populating = BY_ITSELF,
    ) -> Arena:
        """Make a new arena, with all of its memory allocated and faulted in. The caller writes under ``fencing_token``.

        It takes seconds for some gigabytes. ``payload_bytes``: room of one slot. Raises `MemoryPlanError` when there is
        not enough memory, and `CheckpointError` when a file exists at the path, a number is out of range, or
        ``populating`` says that the arena is no longer wanted. Nothing is left behind then.
        """
        geometry = Geometry(slots, payload_bytes, chunk_bytes)
        problem = (
            geometry.problem()
            or _out_of("rank", rank, OWNER_MAX)
            or _out_of("fencing_token", fencing_token, FENCING_TOKEN_MAX)
        )
        if problem:
            raise CheckpointError(f"no such arena can be: {problem}.", remedy="correct that number.")
        me = begin_session()
        try:
            superblock = Superblock(secrets.token_bytes(16), job, rank, fencing_token, geometry, me, seq=1)
            records = {
                geometry.header_at(index): SlotHeader(superblock.arena_id, index, seq=1).encode()
                for index in range(slots)
            }
            records[0] = superblock.encode()
            file = ArenaFile.create(path_or_fd, geometry.total_bytes, records, populating=populating)
        except BaseException:
            end_session(me)
            raise
        return cls(file, superblock, me)

    @classmethod
    def attach(
        cls,
        path_or_fd: str | os.PathLike[str] | int,
        *,
        job: str,
        writable: bool = False,
        fencing_token: int | None = None,
    ) -> Arena:
        """Open an existing arena: read-only, or with ``writable`` as the writer of ``fencing_token``.

        Raises `StaleFencingToken` when a writer with a newer token has attached, `DuplicateOwner` when the writer with
        this token is alive, `IntegrityError` when the file is not a whole arena of this user, and `FormatVersionError`
        for a newer format.
        """
        if writable and (fencing_token is None or not 0 <= fencing_token <= FENCING_TOKEN_MAX):
            raise CheckpointError(
                f"a writer of an arena needs a fencing token, not {fencing_token}.",
                remedy="pass the world's fencing token.",
            )
        file = ArenaFile.open(path_or_fd, writable=writable)
        try:
            superblock = _superblock(file)
            if superblock.geometry.total_bytes != file.size:
                raise IntegrityError(
                    f"the arena {file} has {file.size} bytes, and its superblock says {superblock.geometry.total_bytes}.",
                    remedy="remove it, and restore this rank from another holder.",
                )
            if superblock.job != job:
                raise CheckpointError(
                    f"the arena {file} is of job {superblock.job!r}, not of {job!r}.", remedy="use another path."
                )
            if fencing_token is not None and fencing_token < superblock.fencing_token:
                raise _stale(fencing_token, superblock)
            file.map_all()
            if writable:
                with contextlib.suppress(OSError):  # populated already, or populated on first write
                    file.populate()
            arena = cls(file, superblock, None)
            if writable and fencing_token is not None:
                arena._claim(fencing_token)
            return arena
        except BaseException:
            file.close()
            raise

    @property
    def rank(self) -> int:
        return self._superblock.rank

    @property
    def fencing_token(self) -> int:
        """The fencing token with which this arena was created or attached."""
        return self._superblock.fencing_token

    @property
    def payload_bytes(self) -> int:
        """Room in a slot, in bytes."""
        return self._superblock.geometry.payload_bytes

    @property
    def chunk_bytes(self) -> int:
        return self._superblock.geometry.chunk_bytes

    def memory(self) -> tuple[int, int]:
        """Return the address and the bytes of the whole mapping, for pinning. It does not move before `close`."""
        return self._file.address(), self._file.size

    def slots(self) -> list[SlotInfo]:
        """Read from the file what every slot holds. A slot is BAD when both copies of its header are damaged."""
        self._file.check()
        return [SlotInfo.of(header) for header in self._headers()]

    # -- write
    def begin(
        self,
        number: int,
        step: int,
        *,
        kind: Kind = "data",
        owner: int | None = None,
        keep: Collection[int] = (),
    ) -> SlotWriter:
        """Take a slot to write an image into.

        The order of choice: free, bad, or left by a dead writer; then the oldest image that is not the newest committed
        one of its owner, not of a checkpoint in ``keep``, and not leased. ``owner``: whose image it is; None for this
        rank's. Raises `CheckpointError` when no slot can be taken, or the checkpoint is in one already.
        """
        owner = self.rank if owner is None else owner
        problem = (
            _out_of("checkpoint number", number, NUMBER_MAX)
            or _out_of("step", step, STEP_MAX, least=-1)  # -1: before the first step
            or _out_of("owner", owner, OWNER_MAX)
        )
        if problem:
            raise CheckpointError(f"no such slot can be: {problem}.", remedy="correct that number.")
        with self._changing() as me:
            headers = self._headers()
            for header in headers:
                same = (header.number, header.kind, header.owner) == (number, kind, owner)
                if same and (header.whole or _written_by_the_living(header)):
                    raise CheckpointError(
                        f"checkpoint {number} of rank {owner} is in slot {header.slot} already ({header.state.name}).",
                        remedy="a checkpoint is written once: use the next number.",
                    )
            for header in _candidates(headers, keep):
                at = self._superblock.geometry.header_at(header.slot)
                if not lock(self._file.fd, at, shared=False):
                    continue  # leased
                try:
                    crash_point("arena.begin.chosen")
                    begun = SlotHeader(
                        self._superblock.arena_id,
                        header.slot,
                        SlotState.WRITING,
                        kind,
                        number,
                        step,
                        self.fencing_token,
                        owner,
                        writer=me,
                    )
                    self._file.store(at, begun, "arena.begin")
                finally:
                    unlock(self._file.fd, at)
                writer = SlotWriter(self, begun)
                self._writers.append(writer)
                return writer
        held = ", ".join(
            f"{h.slot}: {h.state.name} {h.number}" + (f" by {h.writer}" if h.state is SlotState.WRITING else "")
            for h in headers
        )
        raise CheckpointError(
            f"the arena {self._file} has no slot that may be written over ({held}); checkpoints {sorted(keep)} must stay.",
            remedy="commit or release a checkpoint, end a lease or a fenced writer, or create the arena with one more slot.",
        )

    def commit(self, number: int, *, kind: Kind | None = None, owner: int | None = None) -> None:
        """Mark all sealed slots of ``number`` as committed. Repeating it is no error.

        Raises `NoUsableCheckpoint` when no slot matches, `IntegrityError` when a chunk table is damaged.
        """
        with self._changing():
            found = self._of(number, kind, owner, (SlotState.SEALED, SlotState.COMMITTED))
            sealed = [header for header in found if header.state is SlotState.SEALED]
            for header in sealed:
                SlotReader(self, header)  # raises when the chunk table is damaged
            for header in sealed:
                self._store(header._replace(state=SlotState.COMMITTED), "arena.commit")

    def mark_bad(self, number: int, reason: str, *, kind: Kind | None = None, owner: int | None = None) -> None:
        """Mark all slots of ``number`` as bad: nothing reads them any more, and they may be overwritten."""
        with self._changing():
            for header in self._of(number, kind, owner, (SlotState.SEALED, SlotState.COMMITTED, SlotState.BAD)):
                self._store(header._replace(state=SlotState.BAD, reason=reason), "arena.mark_bad")

    def release(self, number: int, *, kind: Kind | None = None, owner: int | None = None) -> None:
        """Free the slots of ``number``. Raises `CheckpointError` for the newest committed checkpoint."""
        with self._changing():
            committed = [h.number for h in self._headers() if h.state is SlotState.COMMITTED]
            found = self._of(number, kind, owner, (SlotState.SEALED, SlotState.COMMITTED, SlotState.BAD))
            if number == max(committed, default=-1) and any(h.state is SlotState.COMMITTED for h in found):
                raise CheckpointError(
                    f"checkpoint {number} is the newest committed one of the arena {self._file}.",
                    remedy="commit a newer one first, or mark it as bad.",
                )
            for header in found:
                self._store(SlotHeader(header.arena_id, header.slot), "arena.release")

    # -- read
    def reader(self, number: int, kind: Kind = "data", owner: int | None = None) -> SlotReader:
        """Return a reader of a sealed image.

        Raises `NoUsableCheckpoint` when no slot has it sealed, `IntegrityError` when its chunk table is damaged.
        """
        self._file.check()
        whose = self.rank if owner is None else owner
        return SlotReader(self, self._of(number, kind, whose, (SlotState.SEALED, SlotState.COMMITTED))[0])

    @contextlib.contextmanager
    def lease(self, number: int) -> Iterator[None]:
        """Keep the slots of ``number`` from being overwritten by any process.

        The lease ends with the process that holds it.

        Raises `NoUsableCheckpoint` when the checkpoint is not there or is being overwritten.
        """
        fd = self._file.reopened()
        try:
            for header in self._of(number, None, None, (SlotState.SEALED, SlotState.COMMITTED)):
                locked = lock(fd, self._superblock.geometry.header_at(header.slot), shared=True)
                now = self._header(header.slot)
                if not locked or (now.number, now.digest) != (number, header.digest):
                    raise NoUsableCheckpoint(
                        f"checkpoint {number} is just being written over in the arena {self._file}.",
                        remedy="take a newer one.",
                    )
            yield
        finally:
            os.close(fd)

    # -- end
    def close(self) -> None:
        """Give the claim back and close the file. Slots that were begun and not sealed are free again."""
        if self._file.fd < 0:
            return
        for writer in tuple(self._writers):
            writer.abandon()
        if self._me is not None:
            # fenced or damaged: there is no claim to give back
            with contextlib.suppress(CheckpointError), self._changing():
                self._file.store(0, self._superblock._replace(claim=NOBODY), "arena.close")
            end_session(self._me)
        self._file.close()

    def unlink(self) -> None:
        """Remove the file. Open mappings stay valid until they are closed."""
        self._file.unlink()

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- helpers
    def _claim(self, fencing_token: int) -> None:
        """Become the writer of ``fencing_token``. Raises `StaleFencingToken` or `DuplicateOwner`."""
        with self._file.exclusive():
            superblock = _superblock(self._file)
            if fencing_token < superblock.fencing_token:
                raise _stale(fencing_token, superblock)
            if fencing_token == superblock.fencing_token and superblock.claim.alive():
                raise DuplicateOwner(
                    f"the arena {self._file} has a writer with token {fencing_token} already: {superblock.claim}.",
                    remedy="end that process, or attach with a newer fencing token, which fences it.",
                )
            me = begin_session()
            try:
                self._superblock = superblock._replace(fencing_token=fencing_token, claim=me)
                self._file.store(0, self._superblock, "arena.attach")
            except BaseException:
                end_session(me)
                raise
            self._me = me

    @contextlib.contextmanager
    def _changing(self) -> Iterator[ProcessIdentity]:
        """Hold the file's lock, after checking that the file is whole and that this process is still its writer.

        Every change runs inside it. Raises `CheckpointError`, `StaleFencingToken`, `DuplicateOwner` or
        `IntegrityError`.
        """
        if self._me is None:
            raise CheckpointError(f"the arena {self._file} was attached to read.", remedy="attach with writable=True.")
        if self._me.pid != os.getpid():
            raise DuplicateOwner(
                f"the arena {self._file} belongs to process {self._me.pid}, and this is a fork of it.",
                remedy="attach in the process that writes.",
            )
        with self._file.exclusive():
            self._file.check()
            superblock = _superblock(self._file)
            if superblock.fencing_token > self.fencing_token:
                raise _stale(self.fencing_token, superblock)
            if superblock.arena_id != self._superblock.arena_id or superblock.claim != self._me:
                raise DuplicateOwner(
                    f"the arena {self._file} is claimed by {superblock.claim}.",
                    remedy="attach again, under a newer fencing token.",
                )
            yield self._me

    def _headers(self) -> list[SlotHeader]:
        """Return all slot headers as they were at one moment: they are read until two passes agree.

        A single pass could read one slot before its commit and another after the next begin, and so see no committed
        checkpoint at all.
        """
        former: list[SlotHeader] = []
        for _ in range(_PASSES_MAX):
            headers = [self._header(index) for index in range(self._superblock.geometry.slots)]
            if headers == former:
                break
            former = headers
        return headers

    def _header(self, index: int) -> SlotHeader:
        header = self._file.load(self._superblock.geometry.header_at(index), SlotHeader)
        if header is not None and header.fits(self._superblock, index):
            return header
        return SlotHeader(
            self._superblock.arena_id, index, SlotState.BAD, reason="both copies of its header are damaged"
        )

    def _store(self, header: SlotHeader, operation: str) -> None:
        self._file.store(self._superblock.geometry.header_at(header.slot), header, operation)

    def _of(self, number: int, kind: Kind | None, owner: int | None, states: Collection[SlotState]) -> list[SlotHeader]:
        headers = self._headers()
        found = [
            header
            for header in headers
            if header.number == number
            and header.state in states
            and kind in (None, header.kind)
            and owner in (None, header.owner)
        ]
        if not found:
            held = ", ".join(f"{h.kind} {h.number} of rank {h.owner} ({h.state.name})" for h in headers)
            whose = "" if owner is None else f" of rank {owner}"
            raise NoUsableCheckpoint(
                f"the arena {self._file} does not hold {kind or 'anything'} of checkpoint {number}{whose}. It holds: {held}.",
                remedy="take another checkpoint or holder.",
            )
        return found


def _candidates(headers: list[SlotHeader], keep: Collection[int]) -> list[SlotHeader]:
    """Return the slots that may be overwritten, in the order in which to take them."""
    newest: dict[tuple[Kind, int], int] = {}
    for header in headers:
        if header.state is SlotState.COMMITTED:
            key = (header.kind, header.owner)
            newest[key] = max(newest.get(key, -1), header.number)
    useless = [h for h in headers if not h.whole and not _written_by_the_living(h)]
    useless.sort(key=lambda h: _REUSED_FIRST.index(h.state))
    older = [
        h
        for h in headers
        if h.whole
        and h.number not in keep
        and not (h.state is SlotState.COMMITTED and newest[h.kind, h.owner] == h.number)
    ]
    return useless + sorted(older, key=lambda h: h.number)


def _written_by_the_living(header: SlotHeader) -> bool:
    return header.state is SlotState.WRITING and header.writer.alive()


def _superblock(file: ArenaFile) -> Superblock:
    superblock = file.load(0, Superblock)
    if superblock is None:
        raise IntegrityError(
            f"the arena {file} has no whole superblock: it is damaged, or no arena.",
            remedy="remove it, and restore this rank from another holder.",
        )
    return superblock


def _stale(fencing_token: int, superblock: Superblock) -> StaleFencingToken:
    return StaleFencingToken(
        f"fencing token {fencing_token} is stale: {superblock.fencing_token} has taken the arena.",
        remedy="end this process; it is fenced.",
    )


def _out_of(name: str, value: int, most: int, *, least: int = 0) -> str:
    return "" if least <= value <= most else f"{name} is {value}, not {least} to {most}"
