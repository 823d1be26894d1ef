"""Finds a second loop over ``run.steps()`` in the source. It would be refused only after the first, perhaps after days,
so it is looked for in advance."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from rackrun.worker.script.syntax_tree import syntax_tree

__all__ = ["ONE_LOOP", "second_loop"]

ONE_LOOP = (
    "use one loop, and two step functions: `for step in run.steps(a + b): first(step) if step < a else second(step)`; "
    "run.every and run.at_end hold what else needs collectives."
)


def second_loop(line: str) -> str:
    """Return the line of a loop over the same call that certainly follows the loop at ``line`` in the same block; "" if
    there is none, or no source.

    ``line``: from `user_line`; it begins a loop or is in a loop's head.
    """
    name, _, number = line.rpartition(":")
    tree = syntax_tree(name)
    if tree is None:
        return ""
    for block in _blocks(tree):
        for index, node in enumerate(block):
            if (
                isinstance(node, ast.For)
                and node.lineno <= int(number) < node.body[0].lineno
                and (call := _steps(node))
            ):
                following = _reached(block[index + 1 :])
                return next((f"{name}:{later.lineno}" for later in following if _steps(later) == call), "")
    return ""


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                yield block


def _reached(block: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for node in block:
        if isinstance(node, (ast.Return, ast.Raise)):
            return
        yield node


def _steps(node: ast.stmt) -> str:
    """Return the call's text, such as ``run.steps``, if ``node`` is a loop over it; "" otherwise."""
    if not isinstance(node, ast.For):
        return ""
    calls = [inner.func for inner in ast.walk(node.iter) if isinstance(inner, ast.Call)]
    return next((ast.unparse(call) for call in calls if isinstance(call, ast.Attribute) and call.attr == "steps"), "")
