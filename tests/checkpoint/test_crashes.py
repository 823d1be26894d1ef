"""Some hundreds of the crashes of ``make crashes``, and the proof that it would notice: parts that break a rule are caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rackrun.checkpoint.arena.arena import Arena
from rackrun.checkpoint.arena.arena_folder import ArenaFolder
from rackrun.checkpoint.arena.arena_slot import SlotReader, SlotWriter
from rackrun.checkpoint.commit.commit_protocol import Committer
from rackrun.checkpoint.durable import durable_writer
from rackrun.checkpoint.durable.durable_manifest import Fragment
from rackrun.checkpoint.image.host_copies import HostCopies
from rackrun.checkpoint.manager import restoring
from rackrun.protocol import crash_points
from tests.checkpoint.crash_job import Wrong
from tests.checkpoint.crashes import EVERY_POINT, Tally, series
from tests.variants import in_stories

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.mark.parametrize(
    ("kind", "crashes"),
    [
        ("manager", 30),
        ("trays", 80),
        ("forks", 6),
        *in_stories(("manager", 90), ("trays", 240), ("forks", 18), names=2),
    ],
    ids=str,
)
def test_whatever_crashes_a_restore_is_whole_verified_and_not_older_than_the_last_commit(
    kind: str, crashes: int
) -> None:
    tally = Tally()
    series(kind, 1, crashes, tally)
    assert tally.struck.total() == crashes
    assert tally.lives > crashes


def test_one_seed_plays_the_same_lives_again() -> None:
    tallies = [Tally(), Tally()]
    for tally in tallies:
        series("manager", 5, 10, tally)
        series("trays", 5, 10, tally)
    assert str(tallies[0]) == str(tallies[1])


def test_every_crash_point_of_what_a_job_does_is_of_a_part_that_is_played() -> None:
    others = [name for name in crash_points.CRASH_POINTS if not name.startswith((*EVERY_POINT, "export."))]
    assert others == []


# -- parts that break a rule


def sealed_before_it_is_copied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostCopies, "copy", lambda *_, **__: None)


def older_one_given_up_before_the_commit(patch: pytest.MonkeyPatch) -> None:
    real = Arena.begin

    def begin(self: Arena, number: int, step: int, **which: Any) -> SlotWriter:
        for info in self.slots():
            if info.manifest_digest:
                self.mark_bad(info.number, "older")
        return real(self, number, step, **which)

    patch.setattr(Arena, "begin", begin)


def manifest_before_the_data(patch: pytest.MonkeyPatch) -> None:
    def chunks(data: memoryview, fragment: Fragment) -> Iterator[memoryview]:
        yield memoryview(bytes(len(data)))  # of the right size, and nothing of it is there yet

    patch.setattr(durable_writer, "checked_chunks", chunks)
    patch.setattr(durable_writer, "read_back", lambda *_: None)  # it alone would find that


def verification_left_out(patch: pytest.MonkeyPatch) -> None:
    def chunk(self: SlotReader, index: int) -> memoryview:
        size = self._arena.chunk_bytes
        return self.payload[index * size : (index + 1) * size]

    patch.setattr(SlotReader, "chunk", chunk)


def commit_written_down_nowhere(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ArenaFolder, "remember", lambda *_: None)


def commit_before_the_holders_have_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Committer, "_level", lambda *_: 2)


def restored_where_a_rank_saw_it_alone(patch: pytest.MonkeyPatch) -> None:
    """Each rank takes what it sees to be the newest of its own arena."""
    patch.setattr(restoring, "newest_records", lambda told: list(told)[:1])


@pytest.mark.parametrize(
    ("broken", "kind", "what"),
    [
        (sealed_before_it_is_copied, "manager", "torn"),
        (older_one_given_up_before_the_commit, "manager", "older"),
        (older_one_given_up_before_the_commit, "trays", "older"),
        (manifest_before_the_data, "trays", "older"),
        (verification_left_out, "trays", "torn"),
        (commit_written_down_nowhere, "manager", "older"),
        (commit_before_the_holders_have_it, "trays", "unverified"),
        (restored_where_a_rank_saw_it_alone, "manager", "older"),
    ],
)
def test_a_part_that_breaks_its_rule_is_caught(
    broken: Callable[[pytest.MonkeyPatch], None], kind: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    with pytest.raises(Wrong, match=f"^{what}"):
        series(kind, 3, 400, Tally())
