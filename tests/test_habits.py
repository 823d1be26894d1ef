"""What CONTRIBUTING.md names is there, and the hook for commit messages does what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.check_subject import SUBJECT_CHARS_MAX, mistake_in, subject_of

ROOT = Path(__file__).resolve().parents[1]
QUOTED = re.compile(r"`([^`]+)`")


def quoted(text: str) -> tuple[list[Path], list[str]]:
    """Paths in this repository, and all other words, that stand in backticks."""
    words = QUOTED.findall(text)
    return [ROOT / word for word in words if "/" in word], [word for word in words if "/" not in word]


def rows() -> list[str]:
    """Of the checklists."""
    return [line for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if re.match(r"\| \d+ \| ", line)]


def text_of(path: Path) -> str:
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return "\n".join(file.read_text() for file in files)


@pytest.mark.parametrize("row", rows(), ids=lambda row: " ".join(row.split("|")[1:3]))
def test_a_checklist_names_files_and_names_that_there_are(row: str) -> None:
    paths, words = quoted(row)
    assert [path for path in paths if not path.exists()] == []
    files = "\n".join(map(text_of, paths))
    assert [word for word in words if word not in files] == []


@pytest.mark.parametrize(
    ("message", "subject"),
    [
        ("Add a rung\n\nWhy.\n", "Add a rung"),
        ("\n\n# a comment\n  Add a rung  \n", "Add a rung"),
        ("# only comments\n", ""),
        ("# ------------------------ >8 ------------------------\ndiff --git a b\n", ""),
    ],
)
def test_the_subject_is_the_first_line_that_git_keeps(message: str, subject: str) -> None:
    assert subject_of(message) == subject


def test_a_subject_of_72_characters_is_taken_and_a_longer_one_is_not(tmp_path: Path) -> None:
    assert not mistake_in("x" * SUBJECT_CHARS_MAX + "\n\n" + "y" * 200)
    assert "73 characters, 72 are allowed" in mistake_in("x" * 73)
    assert "no subject" in mistake_in("")
    message = tmp_path / "COMMIT_EDITMSG"
    for text, code in (("short\n", 0), ("x" * 73, 1)):
        message.write_text(text)
        command = [sys.executable, str(ROOT / "tools" / "check_subject.py"), str(message)]
        assert subprocess.run(command, capture_output=True).returncode == code
