"""Which tests reach which lines: seen once by coverage.py, in a tree without a mistake, and kept while the text is the same.

Worker processes are followed too: what a test forks has its name already, and what it starts as a program reads the name from the environment
variable that pytest sets. A process that is killed says nothing, so the answer is what is known to reach a line, not all that does.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import coverage

from tests.mutants import ladder

__all__ = ["Reach", "statement_lines"]

LIMIT_S = 3600.0
_HERE = Path(__file__).parent.name
"""These tests are of the planting itself."""
_SETTINGS = """
[run]
parallel = true
patch = _exit
context = ${{PYTEST_CURRENT_TEST-}}
source =
    {sources}
data_file = {data}
disable_warnings = no-data-collected, module-not-measured, module-not-imported
"""


class Reach:
    """The map in ``folder``: coverage.py's own data, the seconds that each test took, and which text both are true of."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._data, self._known = folder / "lines.coverage", folder / "tests.json"
        self._seconds: dict[str, float] = {}

    def learn(self, tree: Path, sources: Iterable[str], jobs: int) -> None:
        """Run the fast tests in ``tree`` whose text is new: all of them when anything else has changed, a module or a helper."""
        self._folder.mkdir(parents=True, exist_ok=True)
        tests = [path for path in sorted((tree / "tests").rglob("test_*.py")) if path.parent.name != _HERE]
        files = {str(path.relative_to(tree)): _digest([path]) for path in tests}
        rest = _digest(_others(tree))
        known = json.loads(self._known.read_text()) if self._known.exists() else {}
        if known.get("rest") != rest:
            known = {"rest": rest, "files": {}, "seconds": {}}
            self._data.unlink(missing_ok=True)
        new = [name for name, digest in files.items() if known["files"].get(name) != digest]
        seconds = {test: took for test, took in known["seconds"].items() if test.partition("::")[0] not in new}
        if new:
            seconds |= self._run(tree, new, sources, jobs)
            self._known.write_text(json.dumps({"rest": rest, "files": files, "seconds": seconds}))
        self._seconds = seconds

    def tests(self, module: Path, lines: Iterable[int]) -> list[str]:
        """Those that reach one of ``lines``, the fastest first. What only an import reaches, any test of the module may notice."""
        found, anywhere = set(), set()
        wanted, data = set(lines), coverage.CoverageData(str(self._data))
        data.read()
        for path in data.measured_files():
            if path.endswith(f"/{module}"):
                for line, contexts in data.contexts_by_lineno(path).items():
                    names = {_test(context) for context in contexts}
                    anywhere |= names
                    found |= names if line in wanted else set()
        if not found or "" in found:  # before the first test
            found = anywhere
        known = found & self._seconds.keys() or self._seconds.keys()  # a module without functions: anybody
        return sorted(known, key=lambda test: (self._seconds[test], test))

    def _run(self, tree: Path, files: list[str], sources: Iterable[str], jobs: int) -> dict[str, float]:
        """Seconds that each test took; what they reached is added to the data."""
        settings, durations = self._folder / "coverage.ini", self._folder / "durations.json"
        folders = "\n    ".join(str(tree / source) for source in sources)
        settings.write_text(_SETTINGS.format(sources=folders, data=self._folder / "part"))
        command = ladder.pytest_command(
            "-n", str(jobs), "-p", "tests.mutants.reach_plugin", "--timeout", "600", *ladder.FAST, *files, stop=False
        )
        env = {"COVERAGE_PROCESS_START": str(settings), "RACKRUN_DURATIONS": str(durations), "PYTEST_CURRENT_TEST": ""}
        _, said = ladder.run(tree, command, LIMIT_S, env)
        print("\n".join(said.splitlines()[-3:]), file=sys.stderr)
        parts = [str(path) for path in self._folder.glob("part.*")]
        together = coverage.Coverage(data_file=str(self._data), config_file=False)
        together.combine([*parts, *([str(self._data)] if self._data.exists() else [])], strict=False)
        together.save()
        return dict(json.loads(durations.read_text()))


def statement_lines(text: str, line: int) -> range:
    """All lines of the smallest statement that ``line`` is in; of one with a body, those before the body. At the head of a function: its body,
    which a call reaches and an import does not."""
    found = range(line, line + 1)
    for node in ast.walk(ast.parse(text)):  # outer ones first
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno):
            body = getattr(node, "body", None)
            end = body[0].lineno if body else (node.end_lineno or node.lineno) + 1
            if line >= end:
                continue
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found = range(end, (node.end_lineno or end) + 1)
            else:
                found = range(node.lineno, end)
    return found


def _test(context: str) -> str:
    """Of a process that was forked, the name that it had before; of one that was started, what pytest called the test and its phase."""
    name = context.rpartition("|")[2]
    return name.removesuffix(" (setup)").removesuffix(" (call)").removesuffix(" (teardown)")


def _others(tree: Path) -> Iterator[Path]:
    """The modules, and what tests share."""
    for path in sorted(tree.rglob("*.py")):
        if not path.name.startswith("test_") and path.parent.name != _HERE:
            yield path


def _digest(paths: Iterable[Path]) -> str:
    said = hashlib.sha256()
    for path in paths:
        said.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return said.hexdigest()
