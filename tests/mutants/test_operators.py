"""The mistakes that are planted: each can be made, changes what a program does, and is drawn from its seed alone."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path

import pytest

from tests.mutants.__main__ import draw, plant
from tests.mutants.equivalent import Equivalent, changed_lines, read, why
from tests.mutants.ladder import Rung, failed_in, notices, pytest_command
from tests.mutants.operators import OPERATORS, mutated, sites
from tests.mutants.rounds import Climber, climb

ROOT = Path(__file__).resolve().parents[2]

EXAMPLES = {
    "negate a condition": ("if a:\n    b = 1", "if not a:"),
    "another comparison": ("c = a < b", "a <= b"),
    "off by one": ("c = a[3]", "a[4]"),
    "wrong constant": ("c = True", "c = False"),
    "another sign": ("c = a + b", "a - b"),
    "min for max": ("c = min(a, b)", "max(a, b)"),
    "or for and": ("c = a and b", "a or b"),
    "leave a statement out": ("self.a = b", "pass"),
    "return early": ("def f() -> None:\n    a()\n    b()\n    c()", "b()\n    return"),
    "swap arguments": ("c = f(a, b)", "f(b, a)"),
    "swap branches": ("c = a if b else d", "d if b else a"),
    "skip an else": ("if a:\n    b = 1\nelse:\n    b = 2", "if a:\n    b = 1"),
    "alias instead of a copy": ("c = list(a)", "c = a"),
}


@pytest.mark.parametrize("operator", OPERATORS)
def test_each_mistake_can_be_made(operator: str) -> None:
    text, wanted = EXAMPLES[operator]
    (site,) = [site for site in sites(text) if site.operator == operator]
    before, after = mutated(text, site)
    assert wanted in after
    assert before != after


def test_what_nobody_could_notice_is_left_alone() -> None:
    quiet = """
def f(a: int = a) -> Literal[3]:
    '''Of 7 < 8.'''
    log.info("a", 1)
    raise ValueError(f"{a + 1}")

class A(B[1]):
    def __repr__(self):
        return str(1 + 2)

__all__ = ["a", "b"]
"""
    assert sites(quiet) == []


def test_a_mutant_is_drawn_from_its_seed_and_planted_in_a_copy(tmp_path: Path) -> None:
    for number in range(3):
        mutant = draw(1, number)
        assert mutant == draw(1, number)
        copy = tmp_path / mutant.module
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text((ROOT / mutant.module).read_text())
        plant(mutant, tmp_path)
        compile(copy.read_text(), mutant.module, "exec")
    assert len({draw(1, number).diff for number in range(6)}) == 6


def test_who_has_noticed_is_read_from_what_pytest_says() -> None:
    said = "..F\nFAILED tests/a.py::test_b[c - d] - AssertionError\n1 failed"
    assert failed_in(said, ["tests/a.py::test_b[c]", "tests/a.py::test_b[c - d]", "-q"]) == "tests/a.py::test_b[c - d]"
    assert failed_in(said) == "tests/a.py::test_b"
    assert failed_in("..") == ".."


def change_of(equivalent: Equivalent) -> list[str]:
    text = (ROOT / equivalent.module).read_text()
    return [
        changed_lines("\n".join(list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm=""))[2:]))
        for site in sites(text)
        if (site.operator, site.function) == (equivalent.operator, equivalent.function)
        for before, after in [mutated(text, site)]
    ]


def test_what_is_called_equivalent_can_still_be_made_and_has_a_reason() -> None:
    for one in read():
        assert any(found == one.change for found in change_of(one)), f"{one.module} {one.function}: {one.change}"
        assert len(one.why.split()) >= 5, one


def test_a_reason_is_found_wherever_the_lines_have_gone() -> None:
    known = [Equivalent("a.py", "f", "off by one", "-x = 1\n+x = 2", "nobody reads x in this case")]
    mutant: dict[str, object] = {"module": "a.py", "function": "f", "operator": "off by one"}
    assert why({**mutant, "diff": "@@ -9,3 +9,3 @@\n before\n-    x = 1\n+    x = 2"}, known) == known[0].why
    assert not why({**mutant, "diff": "@@ -9,3 +9,3 @@\n-    x = 1\n+    x = 3"}, known)


def rung(code: str) -> Rung:
    return Rung("r", (sys.executable, "-c", code), 100.0, is_pytest=False)


def test_all_climb_together_and_who_is_noticed_climbs_no_further(tmp_path: Path) -> None:
    says = f"open({str(tmp_path / 'ran')!r}, 'a').write('%s')"
    first = Climber(tmp_path, [rung(f"{says % 'a'}; raise SystemExit(1)"), rung(says % "b")], 100.0)
    other = Climber(tmp_path, [rung(says % "c"), rung(f"{says % 'd'}; raise SystemExit('seen')")], 100.0)
    order: list[Climber] = []
    took_s = climb([first, other], tmp_path, 100.0, 1, order.append)
    assert order == [first, other]
    assert (tmp_path / "ran").read_text() == "acd"
    assert (first.by, other.by) == ("r", "seen")
    assert 0 < took_s < 100


def test_without_time_nobody_is_said_to_have_noticed(tmp_path: Path) -> None:
    one = Climber(tmp_path, [rung("raise SystemExit(1)")], 100.0)
    assert climb([one], tmp_path, 0.0, 2, lambda climber: None) == 0.0
    assert not one.by
    alone = Climber(tmp_path, [rung("raise SystemExit(1)")], 0.0)
    assert climb([alone], tmp_path, 100.0, 2, lambda climber: None) == 0.0
    assert not alone.by


@pytest.mark.stories
def test_a_test_that_fails_without_the_mistake_too_or_only_once_has_noticed_nothing_and_the_others_go_on(
    tmp_path: Path,
) -> None:
    broken, well = tmp_path / "broken", tmp_path / "well"
    text = """
from pathlib import Path

import pytest

def test_always():
    assert False

def test_once():
    was = Path("was-here")
    first = not was.exists()
    was.touch()
    assert not first

@pytest.mark.parametrize("what", ["the last one"])
def test_of_the_mistake(what):
    assert Path("mistake").read_text() == "no"
"""
    for tree, said in {broken: "yes", well: "no"}.items():
        tree.mkdir()
        (tree / "test_it.py").write_text(text)
        (tree / "mistake").write_text(said)
        (tree / "pytest.ini").write_text("[pytest]\n")
    tests = [f"test_it.py::test_{name}" for name in ("always", "once", "of_the_mistake[the last one]")]
    for words in (["test_it.py"], tests):
        (broken / "was-here").unlink(missing_ok=True)
        by, seconds = notices(broken, Rung("r", pytest_command(*words), 100.0), well, 100.0)
        assert by == "test_it.py::test_of_the_mistake" + ("[the last one]" if words is tests else "")
        assert seconds < 100
