"""``rackctl ckpt rebuild``: what a job that is gone has left in memory becomes a whole checkpoint on disk, or nothing does."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rackrun.checkpoint import CheckpointManager, MemoryTier
from rackrun.checkpoint.arena.arena import Arena
from rackrun.checkpoint.arena.arena_folder import job_folder
from rackrun.checkpoint.base.errors import CheckpointError
from rackrun.checkpoint.base.process_identity import begin_session
from rackrun.checkpoint.commit.commit_records import CommitRecord, Copy
from rackrun.checkpoint.durable.durable_manifest import MANIFEST, VERIFIED
from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.checkpoint.durable.probation import Probation
from rackrun.checkpoint.durable.storage.files import Files
from rackrun.checkpoint.image.image_layout import ImageLayout, TensorEntry, parse_image, plan_image
from rackrun.checkpoint.image.plain_part import Plain, pack_plain
from rackrun.checkpoint.image.safetensors_image import write_image
from rackrun.checkpoint.offline.export import export
from rackrun.checkpoint.offline.job_remains import Remains
from rackrun.checkpoint.offline.rebuilding import BESIDE, rebuild_checkpoint
from tests.checkpoint.manager.test_manager import Training, trained
from tests.checkpoint.storage import ended, in_child
from tests.ctl.saved import JOB, WORLD, box_of, flip, shard_path, state
from tests.ctl.test_ckpt import newer

Rackctl = Callable[..., Any]
ROOM = 64 << 10


def image(step: int, rank: int) -> tuple[ImageLayout, dict[str, torch.Tensor], bytes]:
    """As a manager writes it; tensors that are not sharded are on all ranks alike."""
    entries, parts = [], {}
    for name, tensor in state(step).items():
        box = box_of(tensor, rank)
        entries.append(TensorEntry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), box))
        parts[name] = tensor[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
    plain = pack_plain(Plain({}, {"step": step, "rank": rank}))
    return plan_image(entries, len(plain)), parts, plain


class Job:
    """Three ranks with arenas of two slots each, as `CheckpointManager` leaves them when all its processes are killed."""

    def __init__(self, shm: Path, root: Path) -> None:
        self.shm, self.root = shm, root
        root.mkdir()
        self.store = DurableStore(root, JOB)
        self.folder = job_folder(shm, JOB, root)

    def leave(
        self,
        *steps: int,
        folder: Path | None = None,
        ranks: tuple[int, ...] = (0, 1, 2),
        as_checkpoint: int | None = None,
    ) -> None:
        """The arenas, and the commit records, of the checkpoints after ``steps``, each of that number or ``as_checkpoint``."""
        folder = folder or self.folder
        folder.mkdir(parents=True, mode=0o700)

        def write() -> None:
            for rank in range(WORLD):
                path = folder / f"rank-{rank:05d}-of-{WORLD:05d}-1-0.arena"
                arena = Arena.create(path, job=JOB, rank=rank, fencing_token=1, slots=2, payload_bytes=ROOM)
                for step in steps[-2:]:
                    layout, parts, plain = image(step, rank)
                    number = step if as_checkpoint is None else as_checkpoint
                    writer = arena.begin(number, step)
                    write_image(layout, parts, plain, writer.payload)
                    writer.seal(layout.total_bytes, layout.layout_hash)
                    arena.commit(number)
            os.kill(os.getpid(), signal.SIGKILL)

        assert ended(in_child(write)) == -signal.SIGKILL
        for step in steps[-2:]:
            record = self.record(folder, step)
            (folder / f"commit-{record.number:012d}.json").write_bytes(record.encode())
        for rank in set(range(WORLD)) - set(ranks):
            next(folder.glob(f"rank-{rank:05d}-*")).unlink()

    def record(self, folder: Path, step: int) -> CommitRecord:
        copies = []
        for path in sorted(folder.glob("*.arena")):
            with Arena.attach(path, job=JOB) as arena:
                info = next(info for info in arena.slots() if info.step == step)
                copies.append(
                    Copy(
                        owner=arena.rank,
                        holder="host",
                        domain="host",
                        digest=info.manifest_digest,
                        layout_hash=info.layout_hash,
                    )
                )
        return CommitRecord.of(info.number, step, 1, copies=copies)

    def arena(self, rank: int) -> Path:
        return next(self.folder.glob(f"rank-{rank:05d}-*"))

    def damage(self, rank: int, step: int) -> None:
        """A bit of what the arena holds of it."""
        with Arena.attach(self.arena(rank), job=JOB) as arena:
            payload = arena.reader(step).payload.tobytes()
        flip(self.arena(rank), self.arena(rank).read_bytes().index(payload) + len(payload) // 2)

    def tensors(self, store: DurableStore, step: int) -> dict[str, torch.Tensor]:
        """What is on disk of it, put together."""
        out = Path(tempfile.mkdtemp(dir=self.root)) / "set"
        with store.open(step) as reader:
            export(reader, out)
        return {name: value for path in sorted(out.glob("*.safetensors")) for name, value in load_file(path).items()}

    def assert_right(self, step: int, store: DurableStore | None = None) -> None:
        store = store or self.store
        assert store.verify(step).ok
        found = self.tensors(store, step)
        assert found.keys() == state(step).keys()
        assert all(torch.equal(value, found[name]) for name, value in state(step).items())
        assert not (store.directory / BESIDE).exists()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    shm = Path(tempfile.mkdtemp(prefix="rackrun-test-", dir="/dev/shm"))
    yield Job(shm, tmp_path / "checkpoints")
    shutil.rmtree(shm)


@pytest.fixture
def rebuild(job: Job, rackctl: Rackctl) -> Callable[..., Any]:
    return lambda *arguments: rackctl("ckpt", "rebuild", job.root, "--arenas", job.shm, *arguments)


def test_the_former_option_generation_still_works(job: Job, rebuild: Rackctl) -> None:
    job.leave(4, 5)
    said = rebuild("--generation", 4, "--json")
    assert (said.code, said.json["number"], said.json["generation"]) == (0, 4, 4)
    assert "--generation is deprecated" in said.err


# -- from memory
def test_the_newest_checkpoint_of_a_killed_job_is_written_to_disk(job: Job, rebuild: Rackctl) -> None:
    job.leave(4, 5)
    said = rebuild("--json")
    assert said.code == 0
    assert (said.json["number"], said.json["step"], said.json["world_size"], said.json["written"]) == (
        5,
        5,
        3,
        True,
    )
    assert said.json["sources"] == {str(rank): str(job.arena(rank)) for rank in range(WORLD)}
    job.assert_right(5)


def test_what_ranks_have_alike_is_written_once(job: Job, rebuild: Rackctl) -> None:
    job.leave(5)
    assert rebuild().code == 0
    written = []
    with job.store.open(5) as reader:
        for rank in range(WORLD):
            data = reader.reader(rank).read(0, reader.reader(rank).size)
            written += [entry.name for entry in parse_image(data, limit=len(data)).entries if not entry.box.sizes]
    assert sorted(written) == sorted(name for name, tensor in state(5).items() if not tensor.dim())


def test_it_is_written_elsewhere_when_that_is_asked_for(job: Job, rebuild: Rackctl, tmp_path: Path) -> None:
    job.leave(5)
    into = tmp_path / "deep" / "elsewhere"
    assert rebuild("--into", into).code == 0
    job.assert_right(5, DurableStore(into, JOB))
    assert not job.store.checkpoints()


def test_arenas_of_several_hosts_are_taken_together(job: Job, rackctl: Rackctl, tmp_path: Path) -> None:
    hosts = [tmp_path / "host-0", tmp_path / "host-1"]
    for host, ranks in zip(hosts, ((0, 2), (1,)), strict=True):
        job.leave(5, folder=host, ranks=ranks)
    assert rackctl("ckpt", "rebuild", job.root, "--job", JOB, "--arenas", hosts[0]).code == 1
    gc.collect()  # the refusal was in this process, and its traceback has views of arenas
    said = rackctl("ckpt", "rebuild", job.root, "--job", JOB, "--arenas", hosts[0], "--arenas", hosts[1])
    assert said.code == 0
    assert "rank 1 from " + str(hosts[1]) in said.out
    job.assert_right(5)


def test_an_older_one_is_taken_where_the_newest_is_damaged_and_it_is_said(job: Job, rebuild: Rackctl) -> None:
    job.leave(4, 5)
    job.damage(1, 5)
    said = rebuild()
    assert said.code == 1  # as when it is done again
    assert "checkpoint 5 cannot be had: Rank 1: " in said.out
    assert "is not what was sealed" in said.out
    job.assert_right(4)


def test_what_is_no_checkpoint_and_has_its_name_is_kept_under_another(job: Job, rebuild: Rackctl) -> None:
    job.leave(5)
    job.store.path(5).mkdir(parents=True)
    (job.store.path(5) / "note").write_text("somebody's")
    assert rebuild().code == 0
    job.assert_right(5)
    (kept,) = job.store.directory.glob("not-gen-*")
    assert (kept / "note").read_text() == "somebody's"


def test_what_was_never_committed_is_not_taken(job: Job, rebuild: Rackctl) -> None:
    job.leave(4, 5)
    (job.folder / f"commit-{5:012d}.json").unlink()
    assert rebuild("--json").json["number"] == 4


def test_what_turned_out_bad_is_not_taken_unless_it_is_named(job: Job, rebuild: Rackctl) -> None:
    job.leave(4, 5)
    Probation(job.store.directory).quarantine(5, "the loss is not a number")
    said = rebuild("--json")
    assert (said.json["number"], said.json["passed_over"]) == (4, {"5": "quarantined: the loss is not a number"})
    assert rebuild("--number", 5, "--json").json["written"] is True


def test_what_turned_out_bad_is_not_enough_though_it_is_whole_on_disk(job: Job, rebuild: Rackctl) -> None:
    job.leave(4, 5)
    assert rebuild().code == 0
    Probation(job.store.directory).quarantine(5, "the loss is not a number")
    said = rebuild("--json")
    assert (said.code, said.json["number"], said.json["written"]) == (0, 4, True)
    job.assert_right(4)
    assert rebuild().code == 0


def test_a_folder_may_have_another_jobs_arenas_whose_name_begins_like_this_ones(job: Job, rackctl: Rackctl) -> None:
    job.leave(5, folder=job.shm / "node1" / job.folder.name)
    (job.shm / "node1" / f"{JOB}-b-0123456789ab").mkdir()
    said = rackctl("ckpt", "rebuild", job.root, "--job", JOB, "--arenas", job.shm)
    assert said.code == 0, said.err


def test_a_killed_job_goes_on_elsewhere_from_what_was_in_its_memory(job: Job, rebuild: Rackctl) -> None:
    """With `CheckpointManager` itself, before and after."""
    job.store.root.rmdir()

    def train() -> None:
        manager = CheckpointManager(job.root, job=JOB, memory=MemoryTier(job.shm))
        trained(manager, 5)
        manager.wait_until_finished()
        os.kill(os.getpid(), signal.SIGKILL)

    whole = Training()
    for _ in range(5):
        whole.step()
    assert ended(in_child(train)) == -signal.SIGKILL
    assert rebuild("--json").json["step"] == 5
    shutil.rmtree(job.folder)
    with CheckpointManager(job.root, job=JOB, memory=None) as manager:
        training = Training(seed=1)
        manager.prepare(training.state)
        report = manager.restore()
        assert report is not None
        assert (report.step, report.tiers) == (5, {0: "shared"})
        assert training.bits() == whole.bits()


# -- what is on disk already
def on_disk(job: Job) -> dict[Path, int]:
    """All but the marks of what was read back."""
    return {path: path.stat().st_mtime_ns for path in job.root.rglob("*.*") if path.is_file() and path.name != VERIFIED}


def test_what_is_whole_and_right_is_not_touched(job: Job, rebuild: Rackctl) -> None:
    job.leave(4, 5)
    assert rebuild().code == 0
    before = on_disk(job)
    said = rebuild()
    assert said.code == 0
    assert "on disk already, and every byte is right" in said.out
    assert on_disk(job) == before


@pytest.mark.parametrize("what", ["bit", "cut", "gone", "fragment", "manifest"])
def test_a_damaged_part_is_mended_from_memory(job: Job, rebuild: Rackctl, what: str) -> None:
    job.leave(4, 5)
    assert rebuild().code == 0
    shard = shard_path(job.store, 5, 1)
    match what:
        case "bit":
            flip(shard, 5000)
        case "cut":
            os.truncate(shard, 100)
        case "gone":
            shard.unlink()
        case "fragment":
            flip(shard.with_suffix(".json"), 40)
        case "manifest":
            flip(job.store.path(5) / MANIFEST, 40)
        case _:
            raise AssertionError(what)
    assert not job.store.verify(5).ok
    assert rebuild("--json").json["written"] is True
    job.assert_right(5)


def test_a_part_that_only_the_disk_has_is_taken_from_there(job: Job, rebuild: Rackctl) -> None:
    job.leave(4, 5)
    assert rebuild().code == 0
    flip(shard_path(job.store, 5, 1), 5000)
    job.arena(2).unlink()
    sources = rebuild("--json").json["sources"]
    assert sources["2"].startswith(str(job.store.path(5)))
    assert sources["1"] == str(job.arena(1))
    job.assert_right(5)


def test_a_part_that_is_damaged_in_both_places_is_refused_and_nothing_is_changed(job: Job, rebuild: Rackctl) -> None:
    job.leave(5)
    assert rebuild().code == 0
    flip(shard_path(job.store, 5, 1), 5000)
    job.damage(1, 5)
    before = on_disk(job)
    said = rebuild()
    assert said.code == 1
    assert "Checkpoint 5: Rank 1: " in said.err
    assert on_disk(job) == before


def test_what_a_newer_release_has_written_is_not_set_aside(job: Job, rebuild: Rackctl) -> None:
    job.leave(4, 5)
    assert rebuild().code == 0
    newer(job.store, 5)
    before = on_disk(job)
    said = rebuild("--json")
    assert (said.code, said.json["number"]) == (1, 4)
    assert before.items() <= on_disk(job).items()


def test_there_may_be_more_ranks_than_files_may_be_open(job: Job, rebuild: Rackctl) -> None:
    """On disk, that is."""
    job.leave(5)
    assert rebuild().code == 0
    shutil.rmtree(job.folder)
    with Remains(job.store, []) as remains:
        before = len(os.listdir("/proc/self/fd"))
        found, missing = remains.find(remains.sought(5))
        assert (len(found), missing) == (WORLD, {})
        assert len(os.listdir("/proc/self/fd")) == before


# -- refusals
def test_a_missing_shard_is_refused_with_its_rank(job: Job, rebuild: Rackctl) -> None:
    job.leave(4, 5, ranks=(0, 2))
    said = rebuild()
    assert said.code == 1
    assert "no checkpoint can be rebuilt" in said.err
    assert "Rank 1: no arena holds rank 1's shard of step" in said.err
    assert "--arenas" in said.err
    assert not job.store.checkpoints()


def test_with_an_older_one_whole_on_disk_a_missing_shard_is_told_too(job: Job, rebuild: Rackctl) -> None:
    job.leave(4)
    assert rebuild().code == 0
    shutil.rmtree(job.folder)
    job.leave(4, 5, ranks=(0, 2))
    said = rebuild()
    assert said.code == 1
    assert "checkpoint 5 cannot be had: Rank 1: " in said.out
    assert "checkpoint 4, step 4, of 3 rank(s): on disk already" in said.out


def test_a_job_that_lives_is_left_to_itself(job: Job, rebuild: Rackctl) -> None:
    job.leave(5)
    with Arena.attach(job.arena(1), job=JOB, writable=True, fencing_token=2):
        said = rebuild()
        assert said.code == 1
        assert "is in use" in said.err
        assert rebuild("--gone", "--dry-run").code == 0
    me = begin_session()
    (job.folder / "keeper-{}-{}-{}-{}".format(*me)).touch()
    assert "would come back for it" in rebuild().err


def test_a_dry_run_writes_nothing(job: Job, rebuild: Rackctl) -> None:
    job.leave(5)
    said = rebuild("--dry-run")
    assert said.code == 0
    assert "would be written" in said.out
    assert not job.store.directory.exists()


def test_bad_usage_is_refused(job: Job, rackctl: Rackctl, tmp_path: Path) -> None:
    for arguments in (
        [job.root],
        [tmp_path / "nowhere"],
        [job.root, "--arenas", tmp_path / "nowhere"],
        [job.root, "--job", "../up"],
    ):
        assert rackctl("ckpt", "rebuild", *arguments).code in (1, 2)
    assert rackctl("ckpt", "rebuild", job.root).code == 2


# -- broken off
class FailsToMove(Files):
    """As when the power goes after what was damaged has been set aside."""

    def rename(self, old: Path, new: Path) -> None:
        if new.name.startswith("gen-") and BESIDE in old.parts and BESIDE not in new.parts:
            raise OSError(5, "gone")
        super().rename(old, new)


def test_what_was_broken_off_is_ended_by_the_next(job: Job, rebuild: Rackctl) -> None:
    """By then one shard's only right bytes are in what was put together."""
    job.leave(5)
    assert rebuild().code == 0
    flip(shard_path(job.store, 5, 1), 5000)
    job.arena(2).unlink()
    with Remains(job.store, [job.folder]) as remains, pytest.raises(CheckpointError, match="cannot be moved"):
        rebuild_checkpoint(remains, DurableStore(job.root, JOB, files=FailsToMove()))
    assert not job.store.path(5).exists()
    assert rebuild("--json").json["written"] is True
    job.assert_right(5)


class Killed(Files):
    """The process is, as soon as it has its name."""

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        if BESIDE in old.parts and BESIDE not in new.parts:
            os.kill(os.getpid(), signal.SIGKILL)


def test_what_was_ended_before_it_had_cleared_up_is_cleared_up_by_the_next(job: Job, rebuild: Rackctl) -> None:
    job.leave(5)

    def write() -> None:
        with Remains(job.store, [job.folder]) as remains:
            rebuild_checkpoint(remains, DurableStore(job.root, JOB, files=Killed()))

    assert ended(in_child(write)) == -signal.SIGKILL
    assert rebuild("--json").json["written"] is False
    assert os.listdir(job.store.directory) == [job.store.path(5).name]


def broken_off(job: Job, rebuild: Rackctl) -> None:
    """Checkpoint 5 is whole only in what was put together; 4 and 5 are in memory, but for a rank's of 5."""
    job.leave(4, 5)
    assert rebuild().code == 0
    flip(shard_path(job.store, 5, 1), 5000)
    job.damage(2, 5)
    with Remains(job.store, [job.folder]) as remains, pytest.raises(CheckpointError, match="cannot be moved"):
        rebuild_checkpoint(remains, DurableStore(job.root, JOB, files=FailsToMove()))
    gc.collect()


def test_another_checkpoint_that_was_broken_off_stays_until_it_is_wanted(job: Job, rebuild: Rackctl) -> None:
    broken_off(job, rebuild)
    assert rebuild("--number", 4, "--json").json["written"] is True
    said = rebuild("--json")
    assert (said.json["number"], said.json["written"]) == (5, True)
    assert all(BESIDE in where for where in said.json["sources"].values())
    job.assert_right(5)
    job.assert_right(4)


def test_a_dry_run_knows_what_was_broken_off(job: Job, rebuild: Rackctl) -> None:
    broken_off(job, rebuild)
    said = rebuild("--dry-run")
    assert said.code == 0
    assert "checkpoint 5, step 5, of 3 rank(s) would be written" in said.out
    assert not job.store.path(5).exists()


def test_what_was_broken_off_is_not_taken_for_what_was_committed_under_that_number_later(
    job: Job, rebuild: Rackctl
) -> None:
    """The job has gone on from an older one, and has come to that number once more."""
    broken_off(job, rebuild)
    shutil.rmtree(job.folder)
    job.leave(6, as_checkpoint=5)
    said = rebuild("--json")
    assert (said.code, said.json["step"]) == (0, 6)


def test_two_at_once_do_not_meet(job: Job, rebuild: Rackctl) -> None:
    job.leave(5)
    said = []

    def meanwhile(_done: int, _total: int) -> None:
        said.append(rebuild("--gone"))  # or as far away as the other one's arenas are

    with Remains(job.store, [job.folder]) as remains:
        rebuild_checkpoint(remains, job.store, progress=meanwhile)
    assert [one.code for one in said] == [1] * WORLD
    assert "another rebuild" in said[0].err
    job.assert_right(5)
    assert sorted(os.listdir(job.store.directory)) == [job.store.path(5).name]


def test_a_job_that_comes_back_meanwhile_is_left_to_itself(job: Job, rebuild: Rackctl) -> None:
    job.leave(5)
    me = begin_session()
    keeper = job.folder / "keeper-{}-{}-{}-{}".format(*me)
    with (
        Remains(job.store, [job.folder]) as remains,
        pytest.raises(CheckpointError, match="would come back"),
    ):
        rebuild_checkpoint(remains, job.store, progress=lambda *_: keeper.touch())
    assert not job.store.path(5).exists()
    gc.collect()
    keeper.unlink()
    assert rebuild().code == 0
    job.assert_right(5)


class Full(Files):
    """After so many bytes."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, fd: int, data: memoryview) -> int:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(28, "No space left on device")
        return super().write(fd, data)


def test_what_does_not_fit_is_refused_and_takes_no_room(job: Job, rebuild: Rackctl) -> None:
    job.leave(5)
    with Remains(job.store, [job.folder]) as remains, pytest.raises(CheckpointError, match="No space left"):
        rebuild_checkpoint(remains, DurableStore(job.root, JOB, files=Full(10_000)))
    assert not os.listdir(job.store.directory)


@pytest.mark.parametrize("what", ["file", "link"])
def test_what_is_not_its_own_is_not_touched(job: Job, rebuild: Rackctl, tmp_path: Path, what: str) -> None:
    job.leave(5)
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "kept").touch()
    job.store.directory.mkdir()
    if what == "link":
        (job.store.directory / BESIDE).symlink_to(tmp_path / "others")
    else:
        (job.store.directory / BESIDE).touch()
    said = rebuild()
    assert said.code == 1
    assert BESIDE in said.err
    assert os.listdir(tmp_path / "others") == ["kept"]
    assert os.listdir(job.store.directory) == [BESIDE]
