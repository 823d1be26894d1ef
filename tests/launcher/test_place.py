"""The folder of a run is one launcher's."""

from __future__ import annotations

from pathlib import Path

import pytest

from rackrun.errors import UsageError
from rackrun.launch.place import RunPlace


def test_of_two_launchers_that_start_in_one_folder_at_the_same_moment_one_is_refused(tmp_path: Path) -> None:
    """Neither has a journal yet. The other's token stays as it is."""
    first = RunPlace.make("first", tmp_path / "run")
    first.write_token("secret")
    with pytest.raises(UsageError, match="another run"):
        RunPlace.make("second", tmp_path / "run")
    assert (tmp_path / "run" / "token").read_text() == "secret"
    first.close()
    RunPlace.make("third", tmp_path / "run").close()
