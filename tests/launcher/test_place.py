"""The folder of a run is one launcher's."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from rackrun.ctl.coordinator_client import ask
from rackrun.errors import UsageError
from rackrun.launch.run.run_directory import Endpoint, Result, RunDirectory, find_run, read_json, read_own

ANOTHER = 12_345
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def test_of_two_launchers_that_start_in_one_folder_at_the_same_moment_one_is_refused(tmp_path: Path) -> None:
    """Neither has a journal yet. The other's token stays as it is."""
    first = RunDirectory.make("first", tmp_path / "run")
    first.write_token("secret")
    with pytest.raises(UsageError, match="another run"):
        RunDirectory.make("second", tmp_path / "run")
    assert (tmp_path / "run" / "token").read_text() == "secret"
    first.close()
    RunDirectory.make("third", tmp_path / "run").close()


@only_root
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o777)
    os.chown(tmp_path / "run", ANOTHER, ANOTHER)
    with pytest.raises(UsageError, match=f"belongs to user {ANOTHER}, not to you"):
        RunDirectory.make("run", tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_refused_wherever_it_leads(tmp_path: Path, there: bool) -> None:
    if there:
        (tmp_path / "mine").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "mine")
    with pytest.raises(UsageError, match="is a link"):
        RunDirectory.make("run", tmp_path / "run")
    assert not there or list((tmp_path / "mine").iterdir()) == []


def test_what_a_run_writes_is_for_its_user_alone(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        place = RunDirectory.make("run", tmp_path / "run")
        place.write_token("secret")
        place.announce(Endpoint(url="http://127.0.0.1:1", run_id="run", pid=1))
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "run").iterdir()}
        assert modes == {"token": 0o600, "endpoint.json": 0o600}
        assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
        assert read_own(tmp_path / "run", "token", secret=True) == b"secret"
        place.close()
    finally:
        os.umask(umask)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """Of which nobody answers: port 1 is nobody's."""
    directory = tmp_path / "run"
    place = RunDirectory.make("run", directory)
    place.write_token("secret")
    place.announce(Endpoint(url="http://127.0.0.1:1", run_id="run", pid=1))
    yield directory
    place.close()


def test_who_may_ask_asks(run: Path) -> None:
    with pytest.raises(UsageError, match="nobody answers"):
        ask(run, "/api/status")


@pytest.mark.parametrize("name", ["endpoint.json", "token"])
def test_a_link_in_place_of_a_file_is_not_followed(run: Path, name: str) -> None:
    (run / name).rename(run / "elsewhere")
    (run / name).symlink_to(run / "elsewhere")
    with pytest.raises(UsageError, match="it is a link"):
        ask(run, "/api/status")


@pytest.mark.parametrize("name", ["endpoint.json", "token"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(run: Path, name: str) -> None:
    (run / name).unlink()
    os.mkfifo(run / name, 0o600)
    with pytest.raises(UsageError, match="no ordinary file"):
        ask(run, "/api/status")


@pytest.mark.parametrize(
    ("name", "mode"), [("endpoint.json", 0o620), ("endpoint.json", 0o602), ("token", 0o640), ("token", 0o604)]
)
def test_a_file_that_others_can_write_or_a_secret_that_they_can_read_is_not_used(
    run: Path, name: str, mode: int
) -> None:
    (run / name).chmod(mode)
    with pytest.raises(UsageError, match="by others: it is not used"):
        ask(run, "/api/status")


@only_root
@pytest.mark.parametrize("name", ["endpoint.json", "token"])
def test_a_file_that_another_user_has_put_there_is_not_used(run: Path, name: str) -> None:
    os.chown(run / name, ANOTHER, ANOTHER)
    with pytest.raises(UsageError, match=f"belongs to user {ANOTHER}, not to you"):
        ask(run, "/api/status")


@only_root
def test_root_may_ask_about_a_users_run(run: Path) -> None:
    for path in (run, run / "endpoint.json", run / "token"):
        os.chown(path, ANOTHER, ANOTHER)
    with pytest.raises(UsageError, match="nobody answers"):
        ask(run, "/api/status")


def run_in(folder: Path, run_id: str) -> RunDirectory:
    place = RunDirectory.make(run_id, folder)
    place.journal.write_text(run_id)
    place.announce(Endpoint(url="http://127.0.0.1:1", run_id=run_id, pid=1))
    return place


def ended(place: RunDirectory, run_id: str) -> None:
    place.finish(Result(run_id=run_id, exit_code=0, because="", remedy="", steps=1, recoveries=(), seconds=1.0))
    place.close()


def test_a_folder_is_used_again_and_keeps_what_was_there(tmp_path: Path) -> None:
    """The same command, started again: the newest run is found at the folder itself, those before it below."""
    folder = tmp_path / "run"
    for run_id in ("first", "second", "third"):
        ended(run_in(folder, run_id), run_id)
    assert find_run(str(folder)) == folder
    assert (folder / "journal.sqlite").read_text() == "third"
    for number, run_id in (("1", "first"), ("2", "second")):
        earlier = find_run(str(folder / "earlier" / number))
        assert (earlier / "journal.sqlite").read_text() == run_id
        result = read_json(earlier / "result.json", Result)
        assert result is not None
        assert result.run_id == run_id


def test_the_folder_of_a_run_under_way_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    place = run_in(folder, "first")
    with pytest.raises(UsageError, match="under way"):
        RunDirectory.make("second", folder)
    assert place.journal.read_text() == "first"
    assert read_json(folder / "endpoint.json", Endpoint) is not None
    ended(place, "first")


def test_a_run_that_was_killed_leaves_a_folder_that_can_be_used(tmp_path: Path) -> None:
    """Its lock ended with it; its token and its endpoint are void."""
    folder = tmp_path / "run"
    place = run_in(folder, "killed")
    place.write_token("of the one that was killed")
    os.close(place._lock)
    ended(run_in(folder, "next"), "next")
    assert (folder / "earlier" / "1" / "journal.sqlite").read_text() == "killed"
    assert not (folder / "token").exists()


def test_a_run_that_never_began_puts_back_what_was_there(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ended(run_in(folder, "first"), "first")
    place = RunDirectory.make("second", folder)
    place.journal.write_text("second")
    place.close()
    assert (folder / "journal.sqlite").read_text() == "first"
    assert not (folder / "earlier").exists()


def test_without_locks_a_run_that_may_be_under_way_is_not_overrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*args: object) -> None:
        raise OSError("Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    folder = tmp_path / "run"
    place = run_in(folder, "first")
    with pytest.raises(UsageError, match=r"endpoint\.json"):
        RunDirectory.make("second", folder)
    ended(place, "first")
    ended(run_in(folder, "second"), "second")


@pytest.mark.parametrize("what", ["token", "endpoint"])
def test_a_full_disk_is_said_and_nothing_is_left(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = RunDirectory.make("run", tmp_path / "run")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", full)
        with pytest.raises(UsageError, match=r"cannot be written: No space left on device. Remedy: make room"):
            place.write_token("x" * 20) if what == "token" else place.announce(
                Endpoint(url="http://x", run_id="run", pid=1)
            )
    place.close()
    assert not list(tmp_path.iterdir())
