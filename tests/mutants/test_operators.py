"""The mistakes that are planted: each can be made, changes what a program does, and is drawn from its seed alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.__main__ import draw, plant
from tests.mutants.ladder import failed_in, nearest
from tests.mutants.operators import OPERATORS, mutated, sites

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


def test_the_nearest_tests_come_first() -> None:
    found = nearest(ROOT, Path("rackrun/worker/state.py"))
    assert found[0] == Path("tests/worker/test_state.py")
    assert Path("tests/checkpoint/test_arena.py") in nearest(ROOT, Path("checkpoint/arena.py"))


def test_who_has_noticed_is_read_from_what_pytest_says() -> None:
    assert failed_in("..F\nFAILED tests/a.py::test_b[c] - AssertionError\n1 failed") == "tests/a.py::test_b[c]"
