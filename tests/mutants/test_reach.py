"""Which tests reach a line: those that run it themselves, fork a process that does, or start one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.reach import Reach, statement_lines

MODULE = """
def own(a: int) -> int:
    return a + 1

def forked() -> int:
    return 2

def started() -> int:
    return 3
"""
TESTS = """
import os, subprocess, sys
from part import module

def test_own() -> None:
    assert module.own(1) == 2

def test_forked() -> None:
    pid = os.fork()
    if pid == 0:
        module.forked()
        os._exit(0)
    os.waitpid(pid, 0)

def test_started() -> None:
    subprocess.run([sys.executable, "-c", "from part import module; module.started()"], check=True)
"""


def test_who_runs_a_line_is_known_also_where_another_process_does(tmp_path: Path) -> None:
    tree, name = tmp_path / "tree", "tests/core/test_it.py"
    for path, text in {"part/module.py": MODULE, name: TESTS}.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text)
    (tree / "pytest.ini").write_text("[pytest]\nmarkers = \n    stories\n    soak\n    slow\n")
    root = Path(__file__).resolve().parents[2]
    (tree / "tests/mutants").symlink_to(root / "tests/mutants")
    reach = Reach(tmp_path / "map")
    reach.learn(tree, ["part"], jobs=1)
    for line, test in {3: "own", 6: "forked", 9: "started"}.items():
        assert reach.tests(Path("part/module.py"), [line]) == [f"{name}::test_{test}"]
    assert len(reach.tests(Path("part/module.py"), [2])) == 3, "an import has reached it before any test"
    again = Reach(tmp_path / "map")
    again._run = None  # type: ignore[assignment,method-assign]  # nothing is new
    again.learn(tree, ["part"], jobs=1)
    assert again.tests(Path("part/module.py"), [3]) == [f"{name}::test_own"]


@pytest.mark.parametrize(
    ("line", "lines"), [(2, range(2, 4)), (3, range(2, 4)), (5, range(4, 6)), (6, range(6, 7)), (7, range(8, 9))]
)
def test_the_lines_of_a_statement_are_those_before_its_body_and_of_a_function_its_body(line: int, lines: range) -> None:
    text = "\nif (a and\n        b):\n    c(1,\n      2)\nd = 3\ndef e() -> None:\n    return\n"
    assert statement_lines(text, line) == lines
