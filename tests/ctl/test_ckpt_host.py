"""``rackctl ckpt plan`` promises what the placement does; ``clean`` takes nothing that somebody may still want."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rackrun.checkpoint.arena.arena import Arena
from rackrun.checkpoint.arena.arena_file import ArenaFile
from rackrun.checkpoint.arena.arena_format import PAGE, Superblock
from rackrun.checkpoint.arena.orphans import ArenaState, find_arenas, remove
from rackrun.checkpoint.base.digest import crc
from rackrun.checkpoint.base.errors import CheckpointError
from rackrun.checkpoint.base.process_identity import ProcessIdentity
from rackrun.checkpoint.redundancy.redundancy_presets import even_labels, redundancy_of
from rackrun.checkpoint.redundancy.shard_placement import PlacementError, Redundancy, place
from tests.checkpoint.storage import ended, in_child

Rackctl = Callable[..., Any]
RACK = ("--world-size", 16, "--bytes-per-rank", "10GB", "--trays", 4)


# -- plan
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("local", Redundancy.local()),
        ("mirror", Redundancy.mirror(2, "tray")),
        ("mirror:rack", Redundancy.mirror(2, "rack")),
        ("mirror:3@tray", Redundancy.mirror(3, "tray")),
        ("xor:8@tray", Redundancy.xor(8, "tray")),
        ("xor:4", Redundancy.xor(4, "tray")),
        ("rs:8+2", Redundancy.rs(8, 2, "tray")),
        ("rs:2+1@rack", Redundancy.rs(2, 1, "rack")),
    ],
)
def test_a_redundancy_in_a_word(text: str, wanted: Redundancy) -> None:
    assert redundancy_of(text) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "",
        "xor:1@tray",
        "mirror:0",
        "raid:5",
        "xor:8@shelf",
        "xor:8@tray ",
        "mirror:-2@tray",
        "rs",
        "rs:4",
        "rs:0+2",
        "rs:2+0",
    ],
)
def test_what_is_no_redundancy_is_refused(text: str, rackctl: Rackctl) -> None:
    with pytest.raises(PlacementError):
        redundancy_of(text)
    assert rackctl("ckpt", "plan", *RACK, "--preset", text).code == 2


@pytest.mark.parametrize(("world_size", "trays", "racks"), [(16, 4, 1), (17, 5, 2), (7, 7, 3), (1, 1, 1), (72, 18, 1)])
def test_ranks_are_spread_over_trays_and_trays_over_racks_evenly(world_size: int, trays: int, racks: int) -> None:
    labels = even_labels(world_size, trays, racks)
    for domains, count in (
        ([one.tray for one in labels.values()], trays),
        ([one.rack for one in labels.values()], racks),
    ):
        assert len(set(domains)) == count
    sizes = [[one.tray for one in labels.values()].count(tray) for tray in {one.tray for one in labels.values()}]
    assert max(sizes) - min(sizes) <= 1
    assert all(str(one.tray).startswith(f"{one.rack}/") for one in labels.values())


def test_a_plan_says_what_it_survives_and_what_it_costs(rackctl: Rackctl) -> None:
    said = rackctl("ckpt", "plan", *RACK, "--preset", "mirror:tray")
    assert said.code == 0
    assert "tray     survives any 1 lost" in said.out
    assert "kept for others" in said.out
    assert "80.0 GB" in said.out  # four ranks, two slots, 10 GB, of their own; and as much for others
    (plan,) = rackctl("ckpt", "plan", *RACK, "--preset", "mirror:tray", "--json").json["plans"]
    assert plan["survives"]["tray"]["any"] == 1
    assert plan["kept_shards"] == 1.0
    assert plan["needed_bytes"] == plan["own_bytes"] + plan["kept_bytes"]


def test_without_a_preset_several_are_compared_and_what_cannot_be_had_says_why(rackctl: Rackctl) -> None:
    said = rackctl("ckpt", "plan", *RACK)
    assert said.code == 0
    rows = {line.split()[0]: line.split() for line in said.out.splitlines() if line.strip()}
    assert rows["local"][1:3] == ["0", "0"]
    assert rows["xor:4@tray"][-3] == "+33.3%"
    assert (rows["rs:2+2@tray"][1], rows["rs:2+2@tray"][-3]) == ("2,", "+100.0%")
    assert "mirror:rack: " in said.out
    assert rackctl("ckpt", "plan", *RACK, "--preset", "mirror:rack").code == 2
    found = rackctl("ckpt", "plan", *RACK, "--json").json
    for plan in found["plans"]:
        placed = place(even_labels(16, 4), redundancy_of(plan["preset"]))
        assert plan["survives"]["tray"]["any"] == placed.tolerance("tray")
        assert plan["survives"]["process"]["any"] == placed.tolerance("process")


def test_copies_that_data_parallelism_has_cost_nothing(rackctl: Rackctl) -> None:
    (plan,) = rackctl("ckpt", "plan", *RACK, "--replicas", 2, "--preset", "mirror:tray", "--json").json["plans"]
    assert (plan["survives"]["tray"]["any"], plan["kept_shards"], plan["kept_bytes"]) == (1, 0.0, 0)


def test_a_plan_that_does_not_fit_here_has_exit_code_1(rackctl: Rackctl) -> None:
    for size, code in (("1kB", 0), ("60TB", 1)):
        arguments = ("ckpt", "plan", "--world-size", 2, "--trays", 2, "--bytes-per-rank", size, "--here")
        assert rackctl(*arguments, "--preset", "mirror:tray").code == code
        assert rackctl(*arguments).code == code


@pytest.mark.parametrize(
    "wrong",
    [
        {"--trays": 17},
        {"--trays": 0},
        {"--racks": 5},
        {"--bytes-per-rank": "ten"},
        {"--bytes-per-rank": "-1"},
        {"--bytes-per-rank": "900TB"},
        {"--replicas": 3},
    ],
    ids=str,
)
def test_numbers_that_cannot_be_are_bad_usage(wrong: dict[str, object], rackctl: Rackctl) -> None:
    given = dict(zip(RACK[::2], RACK[1::2], strict=True)) | wrong
    assert rackctl("ckpt", "plan", *[part for pair in given.items() for part in pair]).code == 2


# -- clean
def make(path: Path, rank: int = 0) -> Arena:
    return Arena.create(path, job="job", rank=rank, fencing_token=1, slots=2, payload_bytes=1000)


def left_by_the_dead(path: Path) -> None:
    assert ended(in_child(lambda: make(path))) == 0


def states(folder: Path) -> dict[str, ArenaState]:
    return {found.path.name: found.state for found in find_arenas(folder)}


def test_only_arenas_of_dead_processes_are_orphans(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    left_by_the_dead(tmp_path / "job" / "dead")
    living = make(tmp_path / "living")
    make(tmp_path / "closed").close()
    left_by_the_dead(tmp_path / "read")
    reader = Arena.attach(tmp_path / "read", job="job")
    (tmp_path / "link").symlink_to(tmp_path / "job" / "dead")
    (tmp_path / "other").write_bytes(bytes(20_000))
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")
    assert states(tmp_path) == {
        "closed": ArenaState.CLOSED,
        "dead": ArenaState.ORPHANED,
        "living": ArenaState.USED,
        "read": ArenaState.USED,
    }
    reader.close()
    living.close()
    assert states(tmp_path)["read"] is ArenaState.ORPHANED


def claimed_by(path: Path, claim: ProcessIdentity) -> None:
    file = ArenaFile.open(path, writable=True)
    superblock = file.load(0, Superblock)
    assert superblock is not None
    with file.exclusive():
        file.store(0, superblock._replace(claim=claim), "arena.attach")
    file.close()


def test_a_pid_that_another_process_has_now_is_not_the_writer(tmp_path: Path) -> None:
    left_by_the_dead(tmp_path / "a")
    namespace = os.stat("/proc/self/ns/pid").st_ino
    claimed_by(tmp_path / "a", ProcessIdentity(os.getppid(), 1, namespace, 5))
    assert states(tmp_path) == {"a": ArenaState.ORPHANED}


def test_the_pid_of_another_namespace_counts_as_alive(tmp_path: Path) -> None:
    left_by_the_dead(tmp_path / "a")
    claimed_by(tmp_path / "a", ProcessIdentity(2**22, 1, 1, 5))
    assert states(tmp_path) == {"a": ArenaState.USED}


def test_a_writer_of_a_slot_that_lives_keeps_the_arena(tmp_path: Path) -> None:
    left_by_the_dead(tmp_path / "a")
    with Arena.attach(tmp_path / "a", job="job", writable=True, fencing_token=2) as arena:
        arena.begin(1, 1)
        claimed_by(tmp_path / "a", ProcessIdentity(2**22, 1, os.stat("/proc/self/ns/pid").st_ino, 5))
        assert states(tmp_path) == {"a": ArenaState.USED}


def test_an_arena_that_cannot_be_read_is_left_alone(tmp_path: Path, rackctl: Rackctl) -> None:
    for name in ("mode", "cut"):
        left_by_the_dead(tmp_path / name)
    (tmp_path / "mode").chmod(0o644)
    with (tmp_path / "cut").open("r+b") as file:
        file.truncate(2 * PAGE)
    assert states(tmp_path)["mode"] is ArenaState.UNREADABLE
    assert rackctl("ckpt", "clean", "--dir", tmp_path, "--yes", "--closed").code == 0
    assert (tmp_path / "mode").exists()
    assert not (tmp_path / "cut").exists(), "whose job is dead, however it looks"


def test_an_arena_of_a_newer_release_is_left_to_it(tmp_path: Path, rackctl: Rackctl) -> None:
    left_by_the_dead(tmp_path / "a")
    data = bytearray((tmp_path / "a").read_bytes())
    for at in (0, PAGE):
        data[at + 8 : at + 12] = (2).to_bytes(2, "little") * 2  # format, oldest format whose reader reads it
        data[at + 508 : at + 512] = crc(memoryview(data)[at : at + 508]).to_bytes(4, "little")
    (tmp_path / "a").write_bytes(data)
    assert states(tmp_path) == {"a": ArenaState.UNREADABLE}
    said = rackctl("ckpt", "clean", "--dir", tmp_path, "--yes")
    assert "format 2" in said.out
    assert (tmp_path / "a").exists()


def test_one_that_is_attached_again_after_the_look_is_not_removed(tmp_path: Path) -> None:
    left_by_the_dead(tmp_path / "a")
    (found,) = find_arenas(tmp_path)
    with Arena.attach(tmp_path / "a", job="job", writable=True, fencing_token=2) as arena:
        with pytest.raises(CheckpointError, match="in use"):
            remove(found)
        assert arena.begin(1, 1).payload
    assert (tmp_path / "a").exists()


def test_clean_lists_and_removes_only_when_told_to(tmp_path: Path, rackctl: Rackctl) -> None:
    left_by_the_dead(tmp_path / "a")
    make(tmp_path / "closed").close()
    with make(tmp_path / "living"):
        said = rackctl("ckpt", "clean", "--dir", tmp_path)
        assert said.code == 0
        assert "arenas of dead jobs: 1, " in said.out
        assert len(os.listdir(tmp_path)) == 3
        said = rackctl("ckpt", "clean", "--dir", tmp_path, "--yes", "--json")
        assert [Path(one["path"]).name for one in said.json["arenas"] if one["removed"]] == ["a"]
        assert sorted(os.listdir(tmp_path)) == ["closed", "living"]
        assert rackctl("ckpt", "clean", "--dir", tmp_path, "--yes", "--closed").code == 0
        assert os.listdir(tmp_path) == ["living"]
    assert rackctl("ckpt", "clean", "--dir", tmp_path / "nowhere").code == 2
