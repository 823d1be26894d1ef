"""Imports point downwards only.

::

    core types and errors <- topology, checkpoint <- core machines <- link <- coordinator, agent, worker <- launch <- launcher, ctl

`rackrun.chaos` may import all of it, and nothing imports `rackrun.chaos`. Imports inside functions and under
``TYPE_CHECKING`` count as well: a type that points upwards is a design that points upwards.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "rackrun"

CORE_TYPES = {
    f"rackrun.core.{name}"
    for name in ("ids", "health", "situation", "events", "commands", "encodable", "wire", "config")
}

# Unit -> height. A module belongs to the longest of these names that its own begins with; within one unit imports are
# free, and units of the same height do not see each other.
HEIGHT = {
    "rackrun.errors": 0,
    "rackrun.version": 0,
    "core types": 1,
    "rackrun.topology": 2,
    "rackrun.checkpoint": 2,
    "rackrun.core": 3,
    "rackrun.link": 4,
    "rackrun.coordinator": 5,
    "rackrun.agent": 5,
    "rackrun.worker": 5,
    "rackrun": 6,  # what `import rackrun` gives to the user
    "rackrun.launch": 7,
    "rackrun.launcher": 8,
    "rackrun.ctl": 8,
    "rackrun.__main__": 9,
    "rackrun.chaos": 10,
}


class Import(NamedTuple):
    importer: str
    imported: str
    where: str


def unit_of(module: str) -> str:
    if module in CORE_TYPES:
        return "core types"
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        if name in HEIGHT:
            return name
    raise AssertionError(f"{module} is not of rackrun")


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or path.is_dir()


def sources() -> Iterator[tuple[str, Path]]:
    """(module name, file) of all of rackrun, the symlinked folders under their rackrun names."""
    folders = [PACKAGE]
    while folders:
        for path in sorted(folders.pop().iterdir()):
            if path.is_dir() and path.name != "__pycache__":
                folders.append(path)
            elif path.suffix == ".py":
                parts = path.relative_to(ROOT).with_suffix("").parts
                yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports_of(module: str, path: Path) -> Iterator[Import]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{where}: relative import"
            base = node.module or ""
            below = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if is_module(name) else base for name in below]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "rackrun":
                yield Import(module, name, where)


def violation(found: Import) -> str | None:
    importer, imported = unit_of(found.importer), unit_of(found.imported)
    if importer == imported or HEIGHT[imported] < HEIGHT[importer]:
        return None
    return f"{found.where}: {found.importer} ({importer}) imports {found.imported} ({imported}), which is not below it"


ALL = list(sources())


@pytest.mark.parametrize(("module", "path"), ALL, ids=[name for name, _ in ALL])
def test_imports_point_downwards(module: str, path: Path) -> None:
    wrong = [story for found in imports_of(module, path) if (story := violation(found))]
    assert not wrong, "\n" + "\n".join(wrong)


def test_the_symlinked_folders_are_seen() -> None:
    units = {unit_of(name) for name, _ in ALL}
    assert {"rackrun.topology", "rackrun.checkpoint", "rackrun.chaos", "core types"} <= units


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("rackrun.agent.agent", "rackrun.link.page", True),
        ("rackrun.core.job", "rackrun.core.events", True),
        ("rackrun.core.events", "rackrun.core.job", False),
        ("rackrun.core.wire", "rackrun.core.ids", True),
        ("rackrun.worker.run", "rackrun.agent.config", False),
        ("rackrun.ctl.main", "rackrun.chaos.plan", False),
        ("rackrun.chaos.simulator", "rackrun.core.job", True),
        ("rackrun.link.page", "rackrun.worker", False),
        ("rackrun.worker.run", "rackrun", False),
    ],
)
def test_the_rule_itself(importer: str, imported: str, allowed: bool) -> None:
    assert (violation(Import(importer, imported, "x.py:1")) is None) == allowed


def test_rackctl_alone_looks_chaos_up_by_its_name() -> None:
    """An import that no import statement shows."""
    named = [
        module for module, path in ALL if '"rackrun.chaos' in path.read_text() and unit_of(module) != "rackrun.chaos"
    ]
    assert named == ["rackrun.ctl.chaos"]


def test_nothing_imports_the_folders_by_their_bare_names() -> None:
    bare = {"topology", "checkpoint", "chaos"}
    for _, path in ALL:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            assert not bare & {name.split(".")[0] for name in names}, f"{path}:{node.lineno}"
