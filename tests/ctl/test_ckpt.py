"""``rackctl ckpt``: what it says of a checkpoint directory is what is in it, and its exit code says whether that is right."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rackrun.checkpoint.durable.durable_manifest import MANIFEST, Manifest, replaced_name, seal, unseal
from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.checkpoint.durable.lease import Lease
from rackrun.checkpoint.durable.probation import Probation
from rackrun.checkpoint.durable.storage.files import set_aside
from rackrun.checkpoint.offline.directory_survey import stores_in
from tests.ctl.saved import CHUNK, WORLD, flip, image, save, shard_path, state

Rackctl = Callable[..., Any]


def listed(store: DurableStore) -> list[int]:
    return [info.number for info in store.checkpoints()]


def everything(root: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.lstat().st_mtime_ns) for path in root.rglob("*"))


# -- ls
def test_ls_says_of_every_checkpoint_its_step_its_ranks_its_bytes_and_whether_it_was_verified(
    tmp_path: Path, rackctl: Rackctl
) -> None:
    for step in (3, 7):
        store = save(tmp_path, step)
    assert store.verify(3).ok
    said = rackctl("ckpt", "ls", tmp_path)
    assert said.code == 0
    rows = [line.split() for line in said.out.splitlines()]
    assert rows[0] == ["run", str(tmp_path / "run")]
    assert [(row[0], row[1], row[2], row[-2:]) for row in rows[2:]] == [
        ("7", "7", "3", ["not", "verified"]),
        ("3", "3", "3", ["s", "verified"]),
    ]
    (job,) = rackctl("ckpt", "ls", tmp_path, "--json").json["jobs"]
    assert [(one["number"], one["step"], one["world_size"], one["verified"]) for one in job["checkpoints"]] == [
        (7, 7, 3, False),
        (3, 3, 3, True),
    ]
    assert job["checkpoints"][0]["bytes"] == sum(len(image(state(7), rank)[1]) for rank in range(WORLD))
    assert all(0 <= one["age_s"] < 600 for one in job["checkpoints"])


def test_ls_shows_what_is_unfinished_waste_or_not_whole_and_the_last_makes_its_exit_code_1(
    tmp_path: Path, rackctl: Rackctl
) -> None:
    for step in (1, 2, 3):
        store = save(tmp_path, step)
    save(tmp_path, 4, ranks=2)
    assert set_aside(store.files, store.path(1)) is not None
    assert rackctl("ckpt", "ls", tmp_path).code == 0
    shard_path(store, 2, 1).unlink()
    said = rackctl("ckpt", "ls", tmp_path)
    assert said.code == 1
    assert "checkpoint 2 is not whole" in said.out
    (job,) = rackctl("ckpt", "ls", tmp_path, "--json").json["jobs"]
    assert [one["number"] for one in job["checkpoints"]] == [3]
    assert [one["number"] for one in job["damaged"]] == [2]
    assert [(one["kind"], one["number"], one["shards"], one["world_size"]) for one in job["leftovers"]] == [
        ("trash", 1, 3, 3),
        ("unfinished", 4, 2, 3),
    ]


@pytest.mark.parametrize("columns", [60, 80])
def test_ls_keeps_its_columns_when_checkpoints_are_passed_over(
    tmp_path: Path, rackctl: Rackctl, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for step in (3, 7, 12):
        store = save(tmp_path, step)
    probation = Probation(store.directory)
    probation.quarantine(12, "the loss is not a number after it, as far as anybody can tell, and this is a long story")
    for _ in range(3):
        probation.restored(7)
    said = rackctl("ckpt", "ls", tmp_path)
    lines = said.out.splitlines()
    assert lines[1].split() == ["number", "step", "ranks", "bytes", "age"]
    rows = [line.split() for line in lines[2:5]]
    assert [(row[0], row[1], row[2], " ".join(row[7:])) for row in rows] == [
        ("12", "12", "3", "not verified, quarantined"),
        ("7", "7", "3", "not verified, passed over"),
        ("3", "3", "3", "not verified"),
    ]
    assert "checkpoint 12 is quarantined: the loss is not a number after it, as far as" in said.out
    assert "checkpoint 7 is passed over: resumed from 3 times, and nothing newer was finished" in said.out


def test_ls_says_of_what_is_no_checkpoint_of_its_name_what_it_is_and_once(tmp_path: Path, rackctl: Rackctl) -> None:
    store = save(tmp_path, 3)
    shutil.copytree(store.path(3), store.path(9999))
    store.path(500).mkdir()
    save(tmp_path, 2)
    (store.path(2) / "MANIFEST.json").unlink()
    said = rackctl("ckpt", "ls", tmp_path)
    assert said.code == 1
    assert (
        f"{store.path(9999)} holds checkpoint 3 of run, and is not used as checkpoint 9999. Remedy: move it" in said.out
    )
    assert f"{store.path(500)} has nothing of a checkpoint in it. Remedy: move it" in said.out
    assert f"checkpoint 2 is not whole: {store.path(2) / 'MANIFEST.json'} is missing." in said.out
    assert said.out.count("is not whole") == 1
    assert rackctl("ckpt", "verify", tmp_path).out.startswith("run  checkpoint 3  ok"), "the newest"


@pytest.mark.parametrize("former", ["--generation 3", "--generation=3"])
def test_a_number_by_both_names_is_refused(tmp_path: Path, rackctl: Rackctl, former: str) -> None:
    save(tmp_path, 3)
    for command in (["export", str(tmp_path), str(tmp_path / "out")], ["rebuild", str(tmp_path)]):
        said = rackctl("ckpt", *command, *former.split(), "--number", "3")
        assert said.code == 2
        assert "--generation and --number cannot be given together" in said.err


def test_ls_shows_all_jobs_of_a_directory_and_one_when_it_is_given_its_own(tmp_path: Path, rackctl: Rackctl) -> None:
    for job in ("run", "other"):
        save(tmp_path, 1, job=job)
    (tmp_path / "notes").mkdir()
    (tmp_path / "readme.txt").touch()

    def jobs(*arguments: object) -> list[str]:
        return [one["job"] for one in rackctl("ckpt", "ls", *arguments, "--json").json["jobs"]]

    assert jobs(tmp_path) == ["other", "run"]
    assert jobs(tmp_path, "--job", "run") == ["run"]
    assert jobs(tmp_path / "run") == ["run"]
    assert jobs(tmp_path / "notes") == []
    assert rackctl("ckpt", "ls", tmp_path, "--job", "none").code == 2


def test_an_empty_directory_has_no_checkpoint_which_only_ls_and_scrub_take_for_well(
    tmp_path: Path, rackctl: Rackctl
) -> None:
    for command, code in (
        (["ls"], 0),
        (["scrub"], 0),
        (["verify"], 1),
        (["export", tmp_path / "out"], 1),
        (["gc", "--keep-last", 1], 1),
    ):
        assert rackctl("ckpt", command[0], tmp_path, *command[1:]).code == code, command


COMMANDS: list[list[object]] = [["ls"], ["verify"], ["scrub"], ["export", "out"], ["gc", "--keep-last", 1]]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_directory_that_is_not_there_a_file_or_a_single_checkpoint_is_bad_usage(
    tmp_path: Path, rackctl: Rackctl, command: list[object]
) -> None:
    store = save(tmp_path, 1)
    (tmp_path / "file").touch()
    for directory, what in (("nowhere", "is not there"), ("file", "is a file"), (store.path(1), "is one checkpoint")):
        said = rackctl("ckpt", command[0], tmp_path / directory, *command[1:])
        assert said.code == 2
        assert what in said.err


# -- verify and scrub
def test_verify_reads_the_newest_and_marks_it_and_all_when_asked(tmp_path: Path, rackctl: Rackctl) -> None:
    for step in (1, 2, 3):
        store = save(tmp_path, step)
    assert rackctl("ckpt", "verify", tmp_path).code == 0
    assert [info.verified for info in store.checkpoints()] == [True, False, False]
    assert rackctl("ckpt", "verify", tmp_path, 1).code == 0
    assert [info.verified for info in store.checkpoints()] == [True, False, True]
    said = rackctl("ckpt", "verify", tmp_path, "--all", "--json")
    assert [(one["number"], one["ok"]) for one in said.json["checkpoints"]] == [(3, True), (2, True), (1, True)]
    assert [info.verified for info in store.checkpoints()] == [True] * 3


def test_long_work_has_a_bar_on_a_terminal_and_none_for_machines(
    tmp_path: Path, rackctl: Rackctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    assert rackctl("ckpt", "verify", tmp_path).err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "verifying" in rackctl("ckpt", "verify", tmp_path).err
    assert "exporting" in rackctl("ckpt", "export", tmp_path, tmp_path / "out").err
    assert rackctl("ckpt", "verify", tmp_path, "--json").err == ""


def test_verify_names_the_rank_the_chunk_and_the_tensors_of_a_flipped_bit(tmp_path: Path, rackctl: Rackctl) -> None:
    store = save(tmp_path, 1)
    layout, payload = image(state(1), 1)
    for name, (start, stop) in layout.extents.items():
        for at in {start, stop - 1} if start < stop else ():
            flip(shard_path(store, 1, 1), at)
            said = rackctl("ckpt", "verify", tmp_path, "--json")
            (damage,) = said.json["checkpoints"][0]["damage"]
            assert (said.code, damage["rank"], damage["chunk"]) == (1, 1, at // CHUNK)
            assert name in damage["tensors"]
            low, high = at // CHUNK * CHUNK, at // CHUNK * CHUNK + CHUNK
            assert all(layout.extents[one][0] < high and layout.extents[one][1] > low for one in damage["tensors"])
            flip(shard_path(store, 1, 1), at)
    flip(shard_path(store, 1, 1), len(payload) - 5)
    said = rackctl("ckpt", "verify", tmp_path)
    assert "DAMAGED" in said.out
    assert f"chunk {(len(payload) - 5) // CHUNK} of" in said.out
    assert "There: " in said.out


def test_a_flipped_bit_in_a_header_is_said_to_be_there(tmp_path: Path, rackctl: Rackctl) -> None:
    store = save(tmp_path, 1)
    for at in (0, 5, 40):
        flip(shard_path(store, 1, 2), at)
        (damage,) = rackctl("ckpt", "verify", tmp_path, "--json").json["checkpoints"][0]["damage"]
        assert (damage["rank"], damage["chunk"], damage["tensors"]) == (2, 0, ["(header)"])
        flip(shard_path(store, 1, 2), at)
    assert rackctl("ckpt", "verify", tmp_path).code == 0


def test_verify_goes_on_after_a_damaged_checkpoint(tmp_path: Path, rackctl: Rackctl) -> None:
    for step in (1, 2, 3, 4):
        store = save(tmp_path, step)
    flip(shard_path(store, 2, 0), -1)
    (store.path(3) / MANIFEST).write_bytes((store.path(3) / MANIFEST).read_bytes()[:-20])
    newer(store, 4)
    said = rackctl("ckpt", "verify", tmp_path, "--all", "--json")
    assert said.code == 1
    assert [one["ok"] for one in said.json["checkpoints"]] == [False, False, False, True]
    assert "format 2" in said.json["checkpoints"][0]["damage"][0]["what"]


def newer(store: DurableStore, number: int) -> None:
    path = store.path(number) / MANIFEST
    body, _ = unseal(path.read_bytes(), Manifest, path)
    fields = {name: getattr(body, name) for name in body.__struct_fields__}
    path.write_bytes(seal(Manifest(**fields | {"format": 2}))[0])


def test_a_checkpoint_that_cannot_be_read_is_refused_in_a_line(tmp_path: Path, rackctl: Rackctl) -> None:
    for step in (1, 2):
        store = save(tmp_path, step)
    newer(store, 1)
    (store.path(2) / MANIFEST).write_bytes((store.path(2) / MANIFEST).read_bytes()[:-20])
    for number, code in ((1, 2), (2, 1), (9, 2)):
        said = rackctl("ckpt", "verify", tmp_path, number)
        assert said.code == code
        assert "Traceback" not in said.out + said.err
        assert rackctl("ckpt", "export", tmp_path, tmp_path / "out", "--number", number).code == code
    assert not (tmp_path / "out").exists()
    assert rackctl("ckpt", "verify", tmp_path, 1, "--all").code == 2
    assert rackctl("ckpt", "verify", tmp_path, "newest").code == 2


def test_scrub_reads_only_what_was_not_verified_yet(tmp_path: Path, rackctl: Rackctl) -> None:
    for step in (1, 2, 3):
        store = save(tmp_path, step)
    assert store.verify(2).ok
    flip(shard_path(store, 2, 0), -1)
    said = rackctl("ckpt", "scrub", tmp_path, "--json")
    assert (said.code, [one["number"] for one in said.json["checkpoints"]]) == (0, [3, 1])
    said = rackctl("ckpt", "scrub", tmp_path)
    assert (said.code, said.out) == (0, "all checkpoints are verified already\n")
    assert rackctl("ckpt", "verify", tmp_path, 2).code == 1
    assert rackctl("ckpt", "scrub", tmp_path).code == 1


# -- gc
def test_gc_deletes_what_the_rule_drops_and_the_newest_verified_stays(tmp_path: Path, rackctl: Rackctl) -> None:
    for step in range(1, 7):
        store = save(tmp_path, step)
    assert store.verify(3).ok
    said = rackctl("ckpt", "gc", tmp_path, "--keep-last", 1, "--keep-every", 4, "--json")
    assert said.code == 0
    assert said.json["dropped"] == [2, 5]
    assert said.json["kept"] == {
        "6": "one of the newest 1",
        "4": "the first from step 4 on",
        "3": "the newest verified",
        "1": "the first from step 0 on",
    }
    assert listed(store) == [6, 4, 3, 1]


def test_a_dry_run_of_gc_says_what_gc_does_and_changes_nothing(tmp_path: Path, rackctl: Rackctl) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    before = everything(tmp_path)
    would = rackctl("ckpt", "gc", tmp_path, "--keep-last", 1, "--dry-run", "--json")
    shown = rackctl("ckpt", "gc", tmp_path, "--keep-last", 1, "--dry-run")
    assert everything(tmp_path) == before
    assert "would be deleted: 1, 2" in shown.out
    assert "checkpoint 3 would be read first" in shown.out
    done = rackctl("ckpt", "gc", tmp_path, "--keep-last", 1, "--json")
    assert done.json["dropped"] == would.json["dropped"] == [1, 2]
    assert would.json["assumed_verified"] == 3


def test_gc_deletes_nothing_when_nothing_is_right(tmp_path: Path, rackctl: Rackctl) -> None:
    for step in (1, 2):
        store = save(tmp_path, step)
        flip(shard_path(store, step, 0), -1)
    assert rackctl("ckpt", "gc", tmp_path, "--keep-last", 1).code == 0
    assert listed(store) == [2, 1]


def test_gc_leaves_alone_what_the_newest_start_of_the_job_has_not_finished(tmp_path: Path, rackctl: Rackctl) -> None:
    save(tmp_path, 1, fencing_token=5)
    for fencing_token in (4, 5, 6):
        save(tmp_path, 2, fencing_token=fencing_token, ranks=1)
    assert rackctl("ckpt", "gc", tmp_path, "--keep-last", 1, "--json").json["unfinished"] == []
    arguments = ("ckpt", "gc", tmp_path, "--keep-last", 1, "--orphan-hours", 0, "--json")
    would = rackctl(*arguments, "--dry-run").json
    done = rackctl(*arguments).json
    assert [name.split("-")[3] for name in done["unfinished"]] == ["4"]
    assert (would["unfinished"], would["trash"]) == (done["unfinished"], done["trash"])


def test_gc_that_cannot_do_what_it_should_says_so(
    tmp_path: Path, rackctl: Rackctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = save(tmp_path, 1)
    save(tmp_path, 2)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "rename", refuse)
    said = rackctl("ckpt", "gc", tmp_path, "--keep-last", 1)
    assert said.code == 1
    assert "not done: read-only" in said.out
    assert listed(store) == [2, 1]


def test_gc_and_export_want_to_know_which_job(tmp_path: Path, rackctl: Rackctl) -> None:
    for job in ("a", "b"):
        save(tmp_path, 1, job=job)
    for command in (
        ["gc", tmp_path, "--keep-last", 1],
        ["export", tmp_path, tmp_path / "out"],
        ["verify", tmp_path, 1],
    ):
        said = rackctl("ckpt", *command)
        assert said.code == 2
        assert "--job" in said.err
        assert rackctl("ckpt", *command, "--job", "b").code == 0
    assert rackctl("ckpt", "gc", tmp_path, "--job", "a").code == 2
    assert rackctl("ckpt", "gc", tmp_path, "--job", "a", "--keep-last", 0).code == 2


# -- all of it
def test_rackctl_starts_without_torch(tmp_path: Path) -> None:
    save(tmp_path, 1)
    program = (
        "import sys; from rackrun.ctl.main import app\n"
        f"app(['ckpt', 'verify', {str(tmp_path)!r}], standalone_mode=False)\n"
        f"app(['ckpt', 'export', {str(tmp_path)!r}, {str(tmp_path / 'out')!r}], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=110)
    assert ran.returncode == 0, ran.stderr


def test_a_quarantined_checkpoint_is_shown_with_its_reason_until_that_is_lifted(
    tmp_path: Path, rackctl: Rackctl
) -> None:
    store = save(tmp_path, 1)
    save(tmp_path, 2)
    for _ in range(3):
        Probation(store.directory).restored(1)
    said = rackctl("ckpt", "quarantine", tmp_path, 2, "--reason", "the loss is not a number")
    assert (said.code, said.out) == (0, "run: checkpoint 2 is quarantined: the loss is not a number\n")

    shown = rackctl("ckpt", "ls", tmp_path)
    assert shown.code == 0
    assert "quarantined: the loss is not a number" in shown.out
    (job,) = rackctl("ckpt", "ls", tmp_path, "--json").json["jobs"]
    assert [one["barred"].partition(":")[0] for one in job["checkpoints"]] == ["quarantined", "passed over"]

    for number in (1, 2):
        assert rackctl("ckpt", "quarantine", tmp_path, number, "--lift", "--json").json["barred"] == ""
    (job,) = rackctl("ckpt", "ls", tmp_path, "--json").json["jobs"]
    assert [one["barred"] for one in job["checkpoints"]] == ["", ""]
    for wrong in ((2,), (2, "--lift", "--reason", "x"), ("newest", "--lift")):
        assert rackctl("ckpt", "quarantine", tmp_path, *wrong).code == 2
    assert rackctl("ckpt", "quarantine", tmp_path, 7, "--lift").code == 2


def test_json_still_has_the_former_names_of_checkpoints_and_their_numbers(tmp_path: Path, rackctl: Rackctl) -> None:
    save(tmp_path, 1)
    (job,) = rackctl("ckpt", "ls", tmp_path, "--json").json["jobs"]
    for said in (job, rackctl("ckpt", "verify", tmp_path, "--json").json):
        assert said["generations"] == said["checkpoints"]
        assert [(one["number"], one["generation"]) for one in said["checkpoints"]] == [(1, 1)]


# -- a checkpoint that was being replaced
def test_a_former_checkpoint_without_its_name_is_shown_and_gc_gives_it_its_name_back(
    tmp_path: Path, rackctl: Rackctl
) -> None:
    for step in (1, 2, 3):
        store = save(tmp_path, step)
    former = store.directory / replaced_name(3)
    store.path(3).rename(former)
    said = rackctl("ckpt", "ls", tmp_path)
    assert said.code == 0
    (line,) = [line for line in said.out.splitlines() if line.startswith(former.name)]
    assert "gives it its name back" in line
    assert rackctl("ckpt", "ls", tmp_path, "--json").json["jobs"][0]["leftovers"][0]["kind"] == "unnamed"
    for command in (
        ["verify", tmp_path],
        ["verify", tmp_path, "3"],
        ["export", tmp_path, tmp_path / "x", "--number", "3"],
    ):
        said = rackctl("ckpt", *command)
        assert said.code == 1
        assert "checkpoint 3 of run is without its name" in said.out + said.err
    said = rackctl("ckpt", "export", tmp_path, tmp_path / "out")
    assert said.code == 0
    assert "checkpoint 3 is not taken: checkpoint 3 of run is without its name" in said.err
    before = everything(tmp_path)
    assert rackctl("ckpt", "gc", tmp_path, "--keep-last", "2", "--dry-run", "--json").json["put_back"] == [3]
    assert everything(tmp_path) == before
    with owned(store):
        assert rackctl("ckpt", "gc", tmp_path, "--keep-last", "2", "--json").json["put_back"] == []
    assert former.exists(), "a job is at work: it may be between its two renames"
    said = rackctl("ckpt", "gc", tmp_path, "--keep-last", "2")
    assert said.code == 0
    assert "has its name again: 3" in said.out
    assert listed(store) == [3, 2]
    assert store.verify(3).ok


def test_a_former_checkpoint_whose_name_is_taken_is_shown_and_gc_deletes_it(tmp_path: Path, rackctl: Rackctl) -> None:
    store = save(tmp_path, 1)
    former = store.directory / replaced_name(1)
    shutil.copytree(store.path(1), former)
    (left,) = rackctl("ckpt", "ls", tmp_path, "--json").json["jobs"][0]["leftovers"]
    assert (left["kind"], left["number"], left["shards"]) == ("replaced", 1, WORLD)
    with owned(store):
        assert rackctl("ckpt", "gc", tmp_path, "--keep-last", "1", "--json").json["trash"] == 0
    assert former.exists()
    assert rackctl("ckpt", "gc", tmp_path, "--keep-last", "1", "--dry-run", "--json").json["trash"] == 1
    assert rackctl("ckpt", "gc", tmp_path, "--keep-last", "1", "--json").json["trash"] == 1
    assert not former.exists()
    assert listed(store) == [1]


def test_a_former_checkpoint_on_its_way_out_is_shown_as_waste(tmp_path: Path, rackctl: Rackctl) -> None:
    store = save(tmp_path, 1)
    former = store.directory / replaced_name(1)
    shutil.copytree(store.path(1), former)
    assert set_aside(store.files, former) is not None
    (left,) = rackctl("ckpt", "ls", tmp_path, "--json").json["jobs"][0]["leftovers"]
    assert (left["kind"], left["number"]) == ("trash", 1)
    store.path(1).rename(former)
    assert [one.job for one in stores_in(tmp_path)] == ["run"], "with nothing else in it"


@contextlib.contextmanager
def owned(store: DurableStore) -> Iterator[None]:
    """A job is at work in the directory."""
    lease = Lease(store, "job", 7)
    lease.take()
    try:
        yield
    finally:
        lease.leave(ended=True)


def test_a_number_that_is_not_there_is_bad_usage(tmp_path: Path, rackctl: Rackctl) -> None:
    save(tmp_path, 3)
    for command in (
        ["verify", tmp_path, "4"],
        ["export", tmp_path, tmp_path / "out", "--number", "4"],
        ["quarantine", tmp_path, "4", "--reason", "bad"],
    ):
        said = rackctl("ckpt", *command)
        assert said.code == 2, command
        assert "checkpoint 4 of run is not in" in said.err
        assert "Remedy: give a number that rackctl ckpt ls lists." in said.err


def test_gc_counts_and_deletes_partial_files_of_dead_writers(tmp_path: Path, rackctl: Rackctl) -> None:
    store = save(tmp_path, 3)
    left = store.directory / ".RETENTION.json-0ddbacf1.part"
    left.write_bytes(b"half")
    os.utime(left, (0, 0))
    assert "0 unfinished, 1 of waste" in rackctl("ckpt", "gc", tmp_path, "--keep-last", "1", "--dry-run").out
    assert "; 1 partial files" in rackctl("ckpt", "gc", tmp_path, "--keep-last", "1").out
    assert not left.exists()
