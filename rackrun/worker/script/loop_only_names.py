"""Finds names that code after the loop over run.steps() reads and only the loop's body binds: a rank that joins after
the loop lacks them."""

from __future__ import annotations

import ast
import types
from collections.abc import Iterator

from rackrun.worker.script.syntax_tree import syntax_tree

__all__ = ["unbound_without_a_turn"]

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_HAVE_NAMES_OF_THEIR_OWN = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)


def unbound_without_a_turn(frame: types.FrameType) -> tuple[str, int] | None:
    """Return the first such name and the line that reads it; ``frame`` must be at the head of a ``for`` loop of its
    function.

    Returns None if there is no such name, no such loop, or no source.
    """
    tree = syntax_tree(frame.f_code.co_filename)
    if tree is None:
        return None
    at = frame.f_lineno
    for function in (node for node in ast.walk(tree) if isinstance(node, _Function)):
        if function.name != frame.f_code.co_name:
            continue
        for loop in _own(function.body):
            if isinstance(loop, ast.For) and loop.lineno <= at <= (loop.iter.end_lineno or at):
                return _first(function, loop)
    return None


def _first(function: _Function, loop: ast.For) -> tuple[str, int] | None:
    end = loop.end_lineno or loop.lineno
    inside = {id(node) for node in ast.walk(loop)}
    nodes = list(_own(function.body))
    bound = {name for node in nodes if id(node) in inside for name in _binds(node)}
    bound -= {name for node in nodes if id(node) not in inside for name in _binds(node)}
    bound -= {one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)}
    reads = [node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    late = [node for node in reads if node.lineno > end and node.id in bound]
    return min(((node.id, node.lineno) for node in late), key=lambda found: found[1], default=None)


def _binds(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Name):
        return [node.id] if isinstance(node.ctx, ast.Store) else []
    if isinstance(node, (_Function, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
    if isinstance(node, (ast.Global, ast.Nonlocal)):
        return list(node.names)
    return []


def _own(nodes: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield ``nodes`` and everything inside them, except the insides of nodes with names of their own."""
    todo: list[ast.AST] = list(nodes)
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, _HAVE_NAMES_OF_THEIR_OWN):
            todo += ast.iter_child_nodes(node)
