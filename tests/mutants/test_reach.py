"""Which tests reach a line: those that run it themselves, fork a process that does, or start one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants import reach as of_reach
from tests.mutants.reach import Reach, moved, places, statement_lines

MODULE = """
def own(a: int) -> int:
    return a + 1

def forked() -> int:
    return 2

def started() -> int:
    return 3
"""
NAME = "tests/core/test_it.py"
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


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    for path, text in {"part/module.py": MODULE, NAME: TESTS}.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text)
    (tree / "pytest.ini").write_text("[pytest]\nmarkers = \n    stories\n    soak\n    slow\n")
    root = Path(__file__).resolve().parents[2]
    (tree / "tests/mutants").symlink_to(root / "tests/mutants")
    return tree


@pytest.mark.stories
def test_who_runs_a_line_is_known_also_where_another_process_does_and_when_the_line_has_moved(tree: Path) -> None:
    reach = Reach(tree.parent / "map")
    reach.learn(tree, ["part"], jobs=1)
    module = Path("part/module.py")
    for line, test in {3: "own", 6: "forked", 9: "started"}.items():
        assert reach.tests(tree, {module: [line]}) == [f"{NAME}::test_{test}"]
    assert len(reach.tests(tree, {module: [2]})) == 3, "an import has reached it before any test"

    changed = MODULE.replace("def forked", "\ndef new() -> int:\n    return 4\n\n\ndef forked")
    (tree / "part/module.py").write_text(changed)
    again = Reach(tree.parent / "map")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_reach, "_seen", None)  # nothing is run
        again.learn(tree, ["part"], jobs=1)
    assert again.tests(tree, {module: [11]}) == [f"{NAME}::test_forked"]


def test_what_was_learned_before_an_interruption_is_kept_and_a_test_that_has_changed_is_run_again(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ("a", "b"):
        (tree / f"tests/core/test_{other}.py").write_text(TESTS)
    runs: list[list[str]] = []

    def seen(tree: Path, batch: of_reach.Batch, sources: object, jobs: int) -> dict[str, float]:
        runs.append(sorted(batch.files))
        if len(runs) == 2:
            raise KeyboardInterrupt
        return dict.fromkeys(batch.files, 1.0)

    monkeypatch.setattr(of_reach, "BATCH", 1)
    monkeypatch.setattr(of_reach, "_seen", seen)
    with pytest.raises(KeyboardInterrupt):
        Reach(tree.parent / "map").learn(tree, ["part"], jobs=1)
    a, b = (f"tests/core/test_{name}.py" for name in "ab")
    Reach(tree.parent / "map").learn(tree, ["part"], jobs=1)
    assert runs == [[a], [b], [b], [NAME]]
    (tree / a).write_text("# changed")
    Reach(tree.parent / "map").learn(tree, ["part"], jobs=1)
    assert runs[4:] == [[a]]
    assert not list((tree.parent / "map").glob("lines-*/batch.json")), "a batch is there when all of it is"


def test_of_a_line_that_is_new_those_count_that_it_was_put_between() -> None:
    before, text = "a\nb\nc\n", "new\na\nc\nother\n"
    assert moved(before, before, [2]) == [2]
    assert moved(text, before, [2]) == [1]
    assert moved(text, before, [3]) == [3]
    assert moved(text, before, [4]) == [3, 4]


@pytest.mark.parametrize(
    ("line", "lines"), [(2, range(2, 4)), (3, range(2, 4)), (5, range(4, 6)), (6, range(6, 7)), (7, range(8, 9))]
)
def test_the_lines_of_a_statement_are_those_before_its_body_and_of_a_function_its_body(line: int, lines: range) -> None:
    text = "\nif (a and\n        b):\n    c(1,\n      2)\nd = 3\ndef e() -> None:\n    return\n"
    assert statement_lines(text, line) == lines


def test_a_constant_and_the_default_of_a_field_show_where_functions_say_their_names(tmp_path: Path) -> None:
    texts = {
        "part/a.py": "PATIENCE_S = 3\n\n\nclass A:\n    meets: bool = False\n\n\ndef f() -> int:\n    return (\n        PATIENCE_S\n    )\n",
        "part/b.py": "from part.a import PATIENCE_S\n\n\ndef g(one: A) -> bool:\n    return one.meets\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    a, b = map(Path, texts)
    assert places(tmp_path, ["part"], a, 1) == {a: {9, 10, 11}}
    assert places(tmp_path, ["part"], a, 5) == {b: {5}}
    assert places(tmp_path, ["part"], a, 9) == {a: {9, 10, 11}}
