"""The durable tier in an object store: the manifest last, every byte read verified, and nothing that is published changed."""

from __future__ import annotations

import errno
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rackrun.checkpoint import CheckpointManager, MemoryTier
from rackrun.checkpoint.base.errors import CheckpointError, IntegrityError, NoUsableCheckpoint
from rackrun.checkpoint.base.location import RemotePath, local_path, parse_location
from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.checkpoint.durable.probation import Probation
from rackrun.checkpoint.durable.retention import Retention, collect
from rackrun.checkpoint.durable.storage.object_store import ObjectFiles
from rackrun.checkpoint.offline.directory_survey import stores_in, survey
from rackrun.ctl.ckpt.ckpt_commands import ckpt
from rackrun.ctl.main import main
from rackrun.errors import UsageError
from rackrun.launch.options.arguments import parse
from rackrun.protocol import crash_points
from tests.checkpoint.manager.test_manager import Training, manager, shm
from tests.checkpoint.object_stores import BOTH, end_connections, kept, remote, s3_server
from tests.checkpoint.storage import JOB, WORLD, payload_of, save, write_shard

__all__ = ["manager", "remote", "s3_server", "shm"]


def verified(store: DurableStore) -> list[int]:
    """Newest first, after all bytes were read and compared."""
    found = store.checkpoints()
    for info in found:
        assert store.verify(info.number).ok
        with store.open(info.number) as reader:
            for rank in range(info.world_size):
                expected = payload_of(info.number, rank)
                assert bytes(reader.read(rank, 0, len(expected))) == expected
    return [info.number for info in found]


# -- names
def test_a_place_in_an_object_store_is_never_taken_for_a_local_folder(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    place = parse_location(Path("s3://bucket/folder"))
    assert str(place / "x") == "s3://bucket/folder/x"
    for act in (
        lambda: place.mkdir(parents=True), place.exists, place.is_dir, lambda: os.listdir(place),
        lambda: (place / "x").write_bytes(b""), lambda: list(place.iterdir()),
    ):  # fmt: skip
        with pytest.raises(UsageError, match="object store"):
            act()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["http://host/x", "hf://x/y", "s3://", "file://host/x", "s3://b/../c", "sftp://h/x"])
def test_a_place_that_is_not_known_is_refused_everywhere(text: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for act in (
        lambda: CheckpointManager(text), lambda: DurableStore(text, JOB), lambda: stores_in(text),
        lambda: local_path(text, "x"), lambda: stores_in(Path(text)),
    ):  # fmt: skip
        with pytest.raises(UsageError, match="Remedy"):
            act()
    assert list(tmp_path.iterdir()) == []


def test_a_file_url_is_the_path_that_it_names(tmp_path: Path) -> None:
    assert parse_location(f"file://{tmp_path}/a%20b") == tmp_path / "a b"
    assert parse_location(f"file://localhost{tmp_path}") == tmp_path
    assert parse_location(f"file:{tmp_path}") == tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["--out-dir", "s3://bucket/x"],
        ["--log-dir", "s3://bucket/x"],
        ["--checkpoint-dir", "hf://bucket/x"],
        ["--checkpoint-dir", "memory://bucket/x"],
    ],
)
def test_the_launcher_refuses_what_it_cannot_use(words: list[str]) -> None:
    with pytest.raises(UsageError, match="Remedy"):
        parse([*words, "train.py"])


@pytest.mark.parametrize(
    "words",
    [
        ["report", "s3://bucket/x"],
        ["status", "s3://bucket/x"],
        ["topology", "show", "--svg=s3://bucket/x"],
        ["chaos", "run", "s3://bucket/plan.yaml"],
        ["ckpt", "ls", "hf://bucket/x"],
        ["ckpt", "rebuild", "s3://bucket/x"],
    ],
)
def test_the_commands_refuse_what_they_cannot_use(
    words: list[str], tmp_path: Path, monkeypatch: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["rackctl", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "Remedy" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_package_that_is_not_installed_is_named(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UsageError, match=r"gcsfs.*rackrun\[object-storage\]"):
        DurableStore("gs://bucket/x", JOB)


# -- writing
@BOTH
def test_a_checkpoint_is_there_once_its_manifest_is_and_reads_as_it_was_written(remote: RemotePath) -> None:
    store = DurableStore(remote, JOB)
    writer = store.writer(3, 30, 1, WORLD)
    for rank in range(WORLD):
        assert store.checkpoints() == []
        assert not writer.finish()
        assert writer.failure is None
        assert write_shard(writer, rank), writer.failure
    assert writer.finish(), writer.failure
    assert writer.finish(), "again"
    assert verified(DurableStore(remote, JOB)) == [3]
    assert [name for name in kept(remote) if name.endswith("MANIFEST.json")] == ["job/gen-000000000003/MANIFEST.json"]
    with store.open(3) as reader, pytest.raises(CheckpointError, match="mapped"):
        reader.shard(0)


def test_what_is_published_is_never_changed_by_whoever_is_late(remote: RemotePath) -> None:
    store = DurableStore(remote, JOB)
    late = store.writer(3, 30, 0, WORLD)  # of an earlier start
    assert write_shard(late, 0)
    assert save(store, 3, fencing_token=1)
    before = kept(remote)
    assert write_shard(late, 1)
    assert late.finish()
    other = store.writer(3, 30, 1, WORLD)
    payload = memoryview(bytearray(payload_of(3, 0))[::-1])
    from rackrun.checkpoint.base.digest import chunk_crcs

    assert not other.write_shard(0, payload, "layout-0", chunk_crcs(payload, 64), chunk_bytes=64)
    assert verified(store) == [3]
    assert [name for name in kept(remote) if "/data-1-" in name or "MANIFEST" in name] == [
        name for name in before if "/data-1-" in name or "MANIFEST" in name
    ]


@BOTH
def test_what_a_later_start_has_passed_over_gives_way_in_one_request(remote: RemotePath) -> None:
    store = DurableStore(remote, JOB)
    assert save(store, 3, fencing_token=1)
    writers = [store.writer(3, 30, 2, WORLD, replaces=True) for _ in range(WORLD)]
    for rank, writer in enumerate(writers):
        assert not writer.finish()
        assert writer.failure is None
        assert verified(store) == [3]
        assert write_shard(writer, rank), writer.failure
    assert [info.fencing_token for info in store.checkpoints()] == [1]
    assert [writer.finish() for writer in writers] == [True] * WORLD
    assert [writer.replaced for writer in writers] == [True, *[False] * (WORLD - 1)]
    assert [info.fencing_token for info in store.checkpoints()] == [2]
    assert verified(store) == [3]
    assert [part.fencing_token for part in store.parts()] == [1], "for retention"


@BOTH
def test_a_late_writer_does_not_replace_what_a_later_start_has_put_there_meanwhile(remote: RemotePath) -> None:
    """It has judged the checkpoint before, which gave way then."""
    store = DurableStore(remote, JOB)
    assert save(store, 3, fencing_token=1)
    late, later = ([store.writer(3, 30, token, WORLD, replaces=True) for _ in range(WORLD)] for token in (2, 3))
    for writers in (late, later):
        for rank, writer in enumerate(writers):
            assert write_shard(writer, rank), writer.failure
    gives_way, judged = late[0]._replacement.gives_way, list[bool]()

    def slow() -> bool:
        judged.append(gives_way())
        if len(judged) == 2:
            assert later[0].finish(), later[0].failure
        return judged[-1]

    late[0]._replacement.gives_way = slow  # type: ignore[method-assign]
    assert late[0].finish(), "the bytes are the same"
    assert judged[:2] == [True, True]
    assert (late[0].replaced, later[0].replaced) == (False, True)
    assert [info.fencing_token for info in store.checkpoints()] == [3]
    assert verified(store) == [3]


@pytest.mark.parametrize("how", ["a scheme without conditions", "a server that ignores them"])
@pytest.mark.parametrize("remote", ["s3"], indirect=True)
def test_a_store_without_conditional_writes_keeps_what_was_passed_over(
    remote: RemotePath, how: str, monkeypatch: Any
) -> None:
    store = DurableStore(remote, JOB)
    assert save(store, 3, fencing_token=1)
    writers = [store.writer(3, 30, 2, WORLD, replaces=True) for _ in range(WORLD)]
    for rank, writer in enumerate(writers):
        assert write_shard(writer, rank), writer.failure
    files: Any = store.files
    if how == "a server that ignores them":
        pipe = files._fs.pipe_file

        def ignoring(*words: Any, **more: Any) -> None:
            pipe(*words, **{name: value for name, value in more.items() if name != "IfMatch"})

        monkeypatch.setattr(files._fs, "pipe_file", ignoring, raising=False)
    else:
        info = files._fs.info
        monkeypatch.setattr(files._fs, "info", lambda path: info(path) | {"ETag": None}, raising=False)
    assert not writers[0].finish()
    assert writers[0].failure is not None
    assert "cannot replace an object on a condition" in writers[0].failure.what
    assert [info.fencing_token for info in store.checkpoints()] == [1]
    assert not [name for name in kept(remote) if ".condition-" in name]
    assert verified(store) == [3]


def harmed(files: ObjectFiles, path: Path, how: str) -> None:
    with_bytes = files._fs.cat_file(path.key)  # type: ignore[attr-defined]
    if how == "gone":
        files.unlink(path)
    elif how == "flipped":
        files.replace(path, with_bytes[:-9] + bytes([with_bytes[-9] ^ 1]) + with_bytes[-8:])
    else:
        files.replace(path, with_bytes[: len(with_bytes) // 2])


@pytest.mark.parametrize("how", ["gone", "flipped", "cut short"])
@pytest.mark.parametrize("what", ["MANIFEST.json", "rank-00000-of-00002.safetensors", "rank-00000-of-00002.json"])
def test_damage_is_found_before_a_byte_is_handed_out(remote: RemotePath, what: str, how: str) -> None:
    store = DurableStore(remote, JOB)
    assert save(store, 1)
    (name,) = (name for name in kept(remote) if name.endswith(what))
    harmed(store.files, remote / name, how)  # type: ignore[arg-type]
    if (what, how) == ("MANIFEST.json", "gone"):
        with pytest.raises(NoUsableCheckpoint):
            store.open(1)
        store.complete()  # all shards are there
        assert verified(store) == [1]
        return
    assert not store.verify(1).ok
    with pytest.raises(IntegrityError), store.open(1) as reader:  # noqa: PT012
        reader.read(0, 0, 10)
        reader.read(0, 0, reader.reader(0).size)


def test_a_bucket_that_is_not_there_is_said_before_training(s3_server: str, tmp_path: Path) -> None:
    one = CheckpointManager("s3://no-such-bucket/x", memory=None)
    with pytest.raises(CheckpointError, match="no-such-bucket"):
        one.prepare(Training().state)
    end_connections()


# -- retention and gc
@BOTH
def test_old_checkpoints_and_what_dead_writers_left_go(remote: RemotePath) -> None:
    store = DurableStore(remote, JOB)
    for number in range(3, 6):
        assert save(store, number, fencing_token=2)
    dead = store.writer(6, 60, 1, WORLD)
    assert write_shard(dead, 0)
    alive = store.writer(6, 60, 2, WORLD)
    assert write_shard(alive, 0)
    assert [left.kind for left in survey(store).leftovers] == ["unfinished", "unfinished"]
    done = collect(store, Retention(2), fencing_token=2, now=lambda: 1e12, orphan_ttl_s=1.0)
    assert (done.failures, done.dropped) == ([], [3])
    assert len(done.orphans) == 1
    assert verified(store) == [5, 4]
    names = kept(remote)
    assert not [name for name in names if "gen-000000000003/" in name]
    assert [name for name in names if "gen-000000000006" in name]
    assert write_shard(alive, 1)
    assert alive.finish()
    assert verified(store) == [6, 5, 4]


# -- a writer that is killed
def test_killed_anywhere_the_older_one_stays_and_the_next_start_finishes_or_removes_the_rest(
    remote: RemotePath,
) -> None:
    """In one process: the store outlives it. At every named point, the writer stops there for good."""

    class Killed(BaseException):
        pass

    points = [name for name in crash_points.CRASH_POINTS if name.startswith(("retention.", "durable."))]
    struck = set()
    for number, point in enumerate(points):
        store, rng = DurableStore(remote / str(number), JOB), random.Random(number)
        assert all(save(store, number, fencing_token=1) for number in (1, 2))
        left = rng.randint(1, 2)

        def die(name: str, point: str = point) -> None:
            nonlocal left
            left -= name == point
            if left == 0:
                struck.add(point)
                raise Killed

        crash_points.enable(die)
        try:
            assert save(store, 3, fencing_token=2)
            collect(store, Retention(1), fencing_token=2, now=lambda: 1e12, orphan_ttl_s=1.0)
        except Killed:
            pass
        finally:
            crash_points.enable(None)
        after = DurableStore(remote / str(number), JOB)
        after.complete()
        found = verified(after)
        assert found[0] in (2, 3), (point, found)
        assert save(after, 4, fencing_token=3)
        done = collect(after, Retention(1), fencing_token=3, now=lambda: 1e12, orphan_ttl_s=1.0)
        assert not done.failures
        assert verified(after)[0] == 4
        assert survey(after).leftovers == (), point
    assert struck >= {
        f"durable.{what}" for what in ("chunk", "data_named", "read_back", "fragment_named", "manifest_named")
    }


# -- the whole of it
@BOTH
def test_a_job_goes_on_from_an_object_store_bit_for_bit(
    manager: Callable[..., CheckpointManager], remote: RemotePath, shm: Path
) -> None:
    whole = Training()
    for _ in range(6):
        whole.step()
    one, training = manager(directory=str(remote), memory=MemoryTier(shm), durable_every=2, keep=2), Training()
    one.prepare(training.state)
    assert one.restore() is None
    for step in range(1, 5):
        training.step()
        one.save(step, durable=True if step == 4 else None)
    one.close()
    two, training = manager(directory=str(remote), memory=None), Training(seed=1)
    two.prepare(training.state)
    report = two.restore()
    assert report is not None
    assert (report.step, report.tiers) == (4, {0: "shared"})
    assert Probation(two._store.directory).attempts() == {4: 1}
    for _ in range(2):
        training.step()
    assert training.bits() == whole.bits()


def test_a_store_that_does_not_answer_is_no_empty_one(
    manager: Callable[..., CheckpointManager], remote: RemotePath, monkeypatch: Any
) -> None:
    one = manager(directory=remote, memory=None)
    one.prepare(Training().state)
    one.save(1, durable=True)
    one.close()

    def refused(*_: object, **__: object) -> Any:
        raise PermissionError("Forbidden")  # as s3fs raises it: without a number

    for call in ("_list", "pread"):
        with monkeypatch.context() as patched:
            if call == "_list":
                patched.setattr(ObjectFiles, "_list", lambda *_: _raise(errno.EACCES))
            else:
                patched.setattr(ObjectFiles, "pread", lambda *_: _raise(errno.EIO))
            two = manager(directory=remote, memory=None)
            two.prepare(Training().state)
            with pytest.raises(NoUsableCheckpoint, match="no checkpoint can be read"):
                two.restore()
            two.close()


def _raise(number: int) -> Any:
    raise OSError(number, os.strerror(number))


def test_the_commands_work_on_an_object_store(remote: RemotePath, tmp_path: Path) -> None:
    training = Training()
    with CheckpointManager(remote, memory=None) as one:
        one.prepare(training.state)
        for step in (1, 2, 3):
            training.step()
            assert one.save(step, durable=True).durable.result()
    run = CliRunner()
    for words, code, said in (
        (["ls", str(remote)], 0, "2"),
        (["verify", str(remote), "--all"], 0, "checkpoint 1  ok"),
        (["quarantine", str(remote), "3", "--reason", "why not"], 0, "quarantined"),
        (["ls", str(remote)], 0, "quarantined"),
        (["export", str(remote), str(tmp_path / "set"), "--all"], 0, "tensors"),
        (["export", str(remote), "s3://bucket/set"], 1, ""),
        (["gc", str(remote), "--keep-last", "1"], 0, "deleted: 1"),
        (["ls", str(remote / "run")], 0, "3"),
    ):
        done = run.invoke(ckpt, words)
        assert (done.exit_code, said in done.output) == (code, True), (words, done.output, done.exception)
    assert (tmp_path / "set" / "model.safetensors.index.json").exists()
