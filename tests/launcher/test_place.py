"""The folder of a run is one launcher's."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from rackrun.ctl.asking import ask
from rackrun.errors import UsageError
from rackrun.launch.place import Endpoint, RunPlace, read_own

ANOTHER = 12_345
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def test_of_two_launchers_that_start_in_one_folder_at_the_same_moment_one_is_refused(tmp_path: Path) -> None:
    """Neither has a journal yet. The other's token stays as it is."""
    first = RunPlace.make("first", tmp_path / "run")
    first.write_token("secret")
    with pytest.raises(UsageError, match="another run"):
        RunPlace.make("second", tmp_path / "run")
    assert (tmp_path / "run" / "token").read_text() == "secret"
    first.close()
    RunPlace.make("third", tmp_path / "run").close()


@only_root
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o777)
    os.chown(tmp_path / "run", ANOTHER, ANOTHER)
    with pytest.raises(UsageError, match=f"belongs to user {ANOTHER}, not to you"):
        RunPlace.make("run", tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_refused_wherever_it_leads(tmp_path: Path, there: bool) -> None:
    if there:
        (tmp_path / "mine").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "mine")
    with pytest.raises(UsageError, match="is a link"):
        RunPlace.make("run", tmp_path / "run")
    assert not there or list((tmp_path / "mine").iterdir()) == []


def test_what_a_run_writes_is_for_its_user_alone(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        place = RunPlace.make("run", tmp_path / "run")
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
    place = RunPlace.make("run", directory)
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
