"""Which tests reach which lines: seen by coverage.py, in a tree without a mistake, some files of tests at a time, and kept.

What has been learned outlives changes of the modules: lines are followed to where they stand now. Delete the map to learn all of it again.

Worker processes are followed too: what a test forks has its name already, and what it starts as a program reads the name from the environment
variable that pytest sets. A process that is killed says nothing, so the answer is what is known to reach a line, not all that does.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import coverage

from tests.mutants import ladder

__all__ = ["Reach", "places", "statement_lines"]

BATCH = 12
"""So many files of tests are run, and what they reach is kept, before others are."""
LIMIT_S = 3600.0
"""For a batch."""
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


class Batch(NamedTuple):
    """Files of tests that were run together. Beside it lies what they reached, as coverage.py writes it."""

    folder: Path
    files: Mapping[str, str]
    """Their digests."""
    seconds: Mapping[str, float]
    """That each test took."""
    modules: Mapping[str, str]
    """Digests of the modules as they were then: their text has that name in the map's folder ``texts``."""


class Reach:
    """The map in ``folder``. Of a file of tests that batch counts which has run its text of today."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._batches: list[tuple[Batch, set[str]]] = []
        """With the files of each that count."""
        self._seconds: dict[str, float] = {}

    def learn(self, tree: Path, sources: Sequence[str], jobs: int) -> None:
        """Run the fast tests in ``tree`` whose text is new. Who is interrupted has lost one batch."""
        tests = [path for path in sorted((tree / "tests").rglob("test_*.py")) if path.parent.name != _HERE]
        files = {str(path.relative_to(tree)): _digest(path.read_text()) for path in tests}
        batches = [_read(path) for path in sorted(self._folder.glob("batch-*.json"))]
        known = {item for batch in batches for item in batch.files.items()}
        new = [name for name, digest in files.items() if (name, digest) not in known]
        groups = [new[start : start + BATCH] for start in range(0, len(new), BATCH)]
        batches.extend(self._run(tree, {name: files[name] for name in group}, sources, jobs) for group in groups)
        self._batches, self._seconds = [], {}
        for batch in batches:
            counts = {name for name, digest in batch.files.items() if files.get(name) == digest}
            self._batches.append((batch, counts))
            self._seconds |= {test: took for test, took in batch.seconds.items() if _file(test) in counts}

    def tests(self, tree: Path, shows: Mapping[Path, Iterable[int]]) -> list[str]:
        """Those that reach one of these lines of modules of ``tree``, the fastest first. What only an import reaches, any test of the modules may
        notice."""
        found, anywhere = set(), set()
        for module, lines in shows.items():
            text, wanted = (tree / module).read_text(), set(lines)
            for batch, counts in self._batches:
                before = self._texts / batch.modules[str(module)] if str(module) in batch.modules else None
                there = set(moved(text, before.read_text(), wanted)) if before else wanted
                for line, names in _names(batch, module):
                    those = {name for name in names if _file(name) in counts or not name}
                    anywhere |= those
                    found |= those if line in there else set()
        if not found or "" in found:  # before the first test
            found = anywhere
        known = found & self._seconds.keys() or self._seconds.keys()  # a module without functions: anybody
        return sorted(known, key=lambda test: (self._seconds[test], test))

    @property
    def _texts(self) -> Path:
        return self._folder / "texts"

    def _run(self, tree: Path, files: Mapping[str, str], sources: Sequence[str], jobs: int) -> Batch:
        self._texts.mkdir(parents=True, exist_ok=True)
        modules = {}
        for path in sorted(path for source in sources for path in (tree / source).rglob("*.py")):
            text = path.read_text()
            modules[str(path.relative_to(tree))] = _digest(text)
            (self._texts / _digest(text)).write_text(text)
        batch = Batch(Path(tempfile.mkdtemp(prefix="lines-", dir=self._folder)), files, {}, modules)
        try:
            seconds = _seen(tree, batch, sources, jobs)
        except BaseException:
            shutil.rmtree(batch.folder)
            raise
        number = sum(1 for _ in self._folder.glob("batch-*.json"))
        said = {**batch._asdict(), "folder": batch.folder.name, "seconds": seconds}
        written = batch.folder / "batch.json"
        written.write_text(json.dumps(said))
        written.rename(self._folder / f"batch-{number:04}.json")
        return batch._replace(seconds=seconds)


def _read(path: Path) -> Batch:
    said = json.loads(path.read_text())
    return Batch(**{**said, "folder": path.parent / said["folder"]})


def _seen(tree: Path, batch: Batch, sources: Sequence[str], jobs: int) -> dict[str, float]:
    """Seconds that each test took; what they reached is in the batch's folder."""
    settings, durations = batch.folder / "coverage.ini", batch.folder / "durations.json"
    folders = "\n    ".join(str(tree / source) for source in sources)
    settings.write_text(_SETTINGS.format(sources=folders, data=batch.folder / "part"))
    words = ["-n", str(jobs), "-p", "tests.mutants.reach_plugin", "--timeout", "600", *ladder.FAST, *batch.files]
    env = {"COVERAGE_PROCESS_START": str(settings), "RACKRUN_DURATIONS": str(durations), "PYTEST_CURRENT_TEST": ""}
    _, said = ladder.run(tree, ladder.pytest_command(*words, stop=False), LIMIT_S, env)
    print("\n".join(said.splitlines()[-3:]), file=sys.stderr)
    together = coverage.Coverage(data_file=str(batch.folder / "lines.coverage"), config_file=False)
    together.combine([str(path) for path in batch.folder.glob("part.*")], strict=False)
    together.save()
    return dict(json.loads(durations.read_text()))


def _names(batch: Batch, module: Path) -> Iterator[tuple[int, set[str]]]:
    """Each line of ``module`` that the batch reached, and the tests that did; "": an import before any of them."""
    data = coverage.CoverageData(str(batch.folder / "lines.coverage"))
    data.read()
    for path in data.measured_files():
        if path.endswith(f"/{module}"):
            for line, contexts in data.contexts_by_lineno(path).items():
                yield line, {_test(context) for context in contexts}


def moved(text: str, before: str, lines: Iterable[int]) -> list[int]:
    """Where ``lines`` of a ``text`` stood ``before``; of one that is new, those that it was put between."""
    if text == before:
        return list(lines)
    old, new = before.splitlines(), text.splitlines()
    stood = {0: 0, len(new) + 1: len(old) + 1}
    for block in difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks():
        stood |= {block.b + i + 1: block.a + i + 1 for i in range(block.size)}
    found = set()
    for line in lines:
        near = (line,) if line in stood else (max(n for n in stood if n < line), min(n for n in stood if n > line))
        found |= {stood[n] for n in near}
    return sorted(found)


def places(tree: Path, sources: Sequence[str], module: Path, line: int) -> dict[Path, set[int]]:
    """Where a mistake at ``line`` of ``module`` shows: module -> lines. A constant, or the default of a field, shows in the functions that say its
    name, of any module in ``sources``; what else there is, where it stands."""
    text = (tree / module).read_text()
    name = _outside_of_functions(text, line)
    found: dict[Path, set[int]] = {}
    if name:
        for path in sorted(path for source in sources for path in (tree / source).rglob("*.py")):
            if lines := _said_in_functions(path.read_text(), name):
                found[path.relative_to(tree)] = lines
    return found or {module: set(statement_lines(text, line))}


def _outside_of_functions(text: str, line: int) -> str:
    """The name that the statement at ``line`` binds; "": it is in a function, or binds none."""
    name = ""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                return ""
            if isinstance(node, ast.Assign | ast.AnnAssign):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                name = target.id if isinstance(target, ast.Name) else ""
    return name


def _said_in_functions(text: str, name: str) -> set[int]:
    says = re.compile(rf"\b{re.escape(name)}\b")
    if not says.search(text):
        return set()
    said = {number for number, line in enumerate(text.splitlines(), 1) if says.search(line)}
    inside: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside |= said & set(range(node.body[0].lineno, (node.end_lineno or 0) + 1))
    return {one for line in inside for one in statement_lines(text, line)}


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


def _file(test: str) -> str:
    return test.partition("::")[0]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
