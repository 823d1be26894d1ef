"""Commit checkpoints between ranks that each hold their own shard: rank 0 decides, and the others learn the outcome.

Rank 0 decides when every rank has sealed, by the rules of `rackrun.checkpoint.commit.commit_protocol`.

Once a rank has learned that checkpoint n is committed it may overwrite checkpoint n - 1: every rank has sealed n, and
none gives n up before n + 1 is committed, which needs a report of that very rank.
"""

from __future__ import annotations

import contextlib

import msgspec

from rackrun.checkpoint.commit.commit_protocol import (
    CheckpointBegan,
    Commit,
    CommitPolicy,
    Committer,
    Confirmed,
    Deadline,
    MembershipBegan,
    ShardSealed,
)
from rackrun.checkpoint.commit.commit_records import CommitRecord
from rackrun.checkpoint.commit.peers import Peers, PeersGone
from rackrun.protocol.crash_points import crash_point, register

__all__ = ["CommitParticipant", "CommitOutcome", "Sealed"]

register("commit.said", "commit.decided", "commit.announced")


class Sealed(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank reports of its shard."""

    step: int
    digest: str = ""
    layout_hash: str = ""
    failure: str = ""
    """Why there is no shard."""
    due: bool = False
    """The checkpoint is to become durable. Rank 0's value counts."""
    asked: bool = False
    """The caller asked for this one to be durable: it waits for an older write, and is not skipped.

    True on any rank counts.
    """
    writing: bool = False
    """An older checkpoint is still being written to disk on this rank."""


class CommitOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a checkpoint."""

    record: CommitRecord | None = None
    reason: str = ""
    """Why the checkpoint was not committed."""
    flush: bool = False
    """All ranks write the checkpoint to disk."""
    passed_over: bool = False
    """The checkpoint was due on disk, and is skipped because some rank is still writing an older one."""


class CommitParticipant:
    """One rank's part in the commits. One thread uses it, one checkpoint after the other."""

    def __init__(self, peers: Peers, fencing_token: int, *, seconds: float) -> None:
        self._peers, self._fencing_token, self._seconds = peers, fencing_token, seconds
        self._committer = Committer(CommitPolicy(copies=1))
        self._committer.handle(MembershipBegan(fencing_token=fencing_token, owners=tuple(range(peers.world_size))))
        self._heard: list[str] = []
        """Keys that all ranks have read once all have sealed the next checkpoint."""

    def settle(self, number: int, mine: Sealed) -> CommitOutcome:
        """Report this rank's shard, and return the outcome, which is the same on all ranks.

        Raises `PeersGone` when the outcome cannot be known.
        """
        own, outcome_key = f"sealed/{number}", f"outcome/{number}"
        self._peers.say(f"{own}/{self._peers.rank}", mine)
        crash_point("commit.said")
        if self._peers.rank != 0:
            return self._peers.hear([outcome_key], CommitOutcome, seconds=2 * self._seconds)[0]
        outcome = self._decide(number, mine, [f"{own}/{rank}" for rank in range(self._peers.world_size)])
        crash_point("commit.decided")
        self._peers.say(outcome_key, outcome)
        crash_point("commit.announced")
        self._heard.append(outcome_key)
        return outcome

    def decline(self, number: int, mine: Sealed) -> None:
        """Report that this rank has no shard, so that the others do not wait for it. The outcome is not read."""
        with contextlib.suppress(PeersGone):
            self._peers.say(f"sealed/{number}/{self._peers.rank}", mine)

    def _decide(self, number: int, mine: Sealed, keys: list[str]) -> CommitOutcome:
        """Decide on rank 0 whether the checkpoint commits. ``keys``: where the ranks' reports are."""
        former = self._committer.newest
        self._committer.handle(CheckpointBegan(number=number, step=mine.step))
        try:
            said = self._peers.hear(keys, Sealed, seconds=self._seconds)
        except PeersGone as error:
            self._committer.handle(Deadline(number=number))
            return CommitOutcome(reason=error.what)
        self._peers.forget([*self._heard, *keys])
        self._heard.clear()
        record: CommitRecord | None = None
        for rank, sealed in enumerate(said):
            holder = f"rank {rank}"
            if former is not None:
                self._committer.handle(Confirmed(number=former.number, holder=holder))
            if not sealed.failure:
                outputs = self._committer.handle(
                    ShardSealed(
                        number=number, step=sealed.step, fencing_token=self._fencing_token, owner=rank, holder=holder,
                        domain=holder, digest=sealed.digest, layout_hash=sealed.layout_hash,
                    )
                )  # fmt: skip
                record = next((output.record for output in outputs if isinstance(output, Commit)), record)
        if record is None:
            self._committer.handle(Deadline(number=number))
            return CommitOutcome(reason=_why(said, mine.step))
        writing = any(sealed.writing for sealed in said)
        asked = any(sealed.asked for sealed in said)
        flush = asked or (mine.due and not writing)
        return CommitOutcome(record=record, flush=flush, passed_over=mine.due and not flush)


def _why(said: list[Sealed], step: int) -> str:
    for rank, sealed in enumerate(said):
        if sealed.failure:
            return f"rank {rank}: {sealed.failure}"
        if sealed.step != step:
            return f"rank {rank} has saved step {sealed.step}, rank 0 step {step}"
    return "too few shards"
