"""What stores ask of files in a directory of this host."""

from __future__ import annotations

from pathlib import Path

from rackrun.checkpoint.files import Files


def test_the_directory_of_all_jobs_is_made_with_those_above_it_and_may_be_there(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b"
    for _ in range(2):
        Files().make_root(root)
        assert root.is_dir()
