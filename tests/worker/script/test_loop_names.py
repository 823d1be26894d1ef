"""Names that a script reads after the loop over run.steps(), and that only the loop binds: seen before the first step."""

from __future__ import annotations

import linecache
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent, indent

import pytest

from rackrun.worker.script.loop_only_names import unbound_without_a_turn

Found = tuple[str, int] | None
STRANGERS = Path(__file__).parents[2] / "strangers" / "scripts"


class Steps(Iterator[int]):
    """Tells at its first turn what is found where it is called from."""

    def __init__(self) -> None:
        self.found: list[Found] = []

    def __next__(self) -> int:
        frame = sys._getframe(1)
        self.found.append(unbound_without_a_turn(frame))
        if len(self.found) > 1:
            raise StopIteration
        return 0


def look(body: str) -> Found:
    """In a function with this body, line 1 of which is line 2 of its file."""
    source = "def main(steps, given=None):\n" + indent(dedent(body).strip("\n"), "    ") + "\n"
    name = f"script {hash(source)}"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    module = types.ModuleType("script")
    exec(compile(source, name, "exec"), module.__dict__)
    steps = Steps()
    module.main(steps)
    return steps.found[0]


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("for step in steps:\n    pass\nstr(step)", ("step", 4)),
        ("for step in steps:\n    loss = 1.0\nstr(loss)", ("loss", 4)),
        ("for step in steps:\n    a, (b, *c) = 1, (2, 3)\nstr(c)\nstr(b)", ("c", 4)),
        ("for step in steps:\n    if (n := 1):\n        pass\nstr(n)", ("n", 5)),
        ("for step in steps:\n    import math as m\nm.pi", ("m", 4)),
        ("for step in steps:\n    with open('/dev/null') as file:\n        pass\nfile.closed", ("file", 5)),
        ("for step in steps:\n    def f(): return 1\nf()", ("f", 4)),
        ("for _, step in zip(range(1), steps):\n    pass\nif True:\n    str(step)", ("step", 5)),
    ],
)
def test_what_only_the_loop_binds_is_found_where_it_is_read(body: str, found: Found) -> None:
    assert look(body) == found


@pytest.mark.parametrize(
    "body",
    [
        "for step in steps:\n    str(step)",
        "step = 0\nfor step in steps:\n    pass\nstr(step)",
        "for step in steps:\n    pass\nstep = 5\nstr(step)",
        "for step in steps:\n    given = 1\nstr(given)",
        "for step in steps:\n    loss = 1\nsum(loss for loss in [1])",
        "for step in steps:\n    loss = 1\ndef show(loss): return loss\nshow(2)",
        "losses = []\nfor step in steps:\n    losses.append(step)\nstr(losses)",
        "for step in steps:\n    pass\nstr(given)",
    ],
)
def test_what_is_bound_elsewhere_too_is_nothing_to_tell(body: str) -> None:
    assert look(body) is None


def test_code_without_source_is_left_alone() -> None:
    module = types.ModuleType("script")
    exec("def main(steps):\n    for step in steps: pass\n    str(step)", module.__dict__)
    steps = Steps()
    module.main(steps)
    assert steps.found[0] is None
