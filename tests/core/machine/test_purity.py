"""The core is pure: no clock, no randomness, no I/O, and nothing whose order is an accident."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import rackrun.core

PURE = [
    "rackrun.checkpoint.base.deprecation",
    "rackrun.checkpoint.base.errors",
    "rackrun.checkpoint.redundancy.failure_domain_sets",
    "rackrun.checkpoint.redundancy.galois",
    "rackrun.checkpoint.redundancy.shard_placement",
    "rackrun.protocol.commands",
    "rackrun.protocol.encodable",
    "rackrun.protocol.events",
    "rackrun.protocol.gpu_health",
    "rackrun.protocol.ids",
    "rackrun.protocol.job_config",
    "rackrun.protocol.policy_types",
    "rackrun.protocol.timers",
    "rackrun.protocol.wire",
    "rackrun.topology.gpu_driver.readings",
    "rackrun.topology.health.circuit_breaker",
    "rackrun.topology.model.errors",
    "rackrun.topology.model.mesh",
    "rackrun.topology.model.racks",
    "rackrun.topology.placement.arrays",
    "rackrun.topology.placement.clique_assignment",
    "rackrun.topology.placement.exhaustive",
    "rackrun.topology.placement.objective",
    "rackrun.topology.placement.rank_assignment",
    "rackrun.topology.placement.slot_assignment",
    "rackrun.topology.placement.solver",
    "rackrun.topology.sources.partial_topology",
]
"""What the core takes from elsewhere is as pure."""
ROOT = Path(rackrun.core.__file__).parents[1]
FILES = [
    *sorted(Path(rackrun.core.__file__).parent.rglob("*.py")),
    *(ROOT.joinpath(*name.split(".")[1:]).with_suffix(".py") for name in PURE),
]
IMPURE = {
    "asyncio", "datetime", "io", "logging", "multiprocessing", "os", "pathlib", "random", "secrets", "select", "shutil",
    "signal", "socket", "subprocess", "sys", "tempfile", "threading", "time", "torch", "uuid",
}  # fmt: skip
IMPURE_CALLS = {"open", "print", "input", "id", "hash", "exec", "eval"}


def imports(tree: ast.AST) -> list[str]:
    found = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name if name in PURE else node.module or "" for name in modules]
    return found


def is_set(node: ast.expr) -> bool:
    if isinstance(node, ast.Set | ast.SetComp):
        return True
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("set", "frozenset")


def loops(tree: ast.AST) -> list[ast.expr]:
    return [node.iter for node in ast.walk(tree) if isinstance(node, ast.For | ast.comprehension)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_core_is_pure(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for name in imports(tree):
        assert name.partition(".")[0] not in IMPURE, f"{path.name} imports {name}"
        if name.startswith("rackrun."):
            known = name.startswith("rackrun.core") or name in ("rackrun.errors", *PURE)
            assert known, f"{path.name} imports {name}"
    calls = [node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    assert not IMPURE_CALLS.intersection(calls), f"{path.name} calls {IMPURE_CALLS.intersection(calls)}"
    unordered = [ast.unparse(node) for node in loops(tree) if is_set(node)]
    assert not unordered, f"{path.name} iterates over {unordered}"


def test_the_check_itself_sees_what_is_impure() -> None:
    assert imports(ast.parse("import os.path\nfrom time import time")) == ["os.path", "time"]
    loop = "for a in {1}: pass\nfor a in [1]: pass\n"
    assert [is_set(node) for node in loops(ast.parse(loop))] == [True, False]
    assert all(is_set(node) for node in loops(ast.parse("[a for a in frozenset(b)]")))
