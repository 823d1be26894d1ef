"""Mistakes that people make, as changes of one node of a module's syntax tree.

Nothing is changed that cannot be noticed by what a program does: docstrings, messages of errors, logs, ``__repr__``, annotations, ``__all__``.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from typing import NamedTuple

__all__ = ["OPERATORS", "Site", "mutated", "sites"]

Change = Callable[[ast.AST], ast.AST | None]
"""Gives the node that takes the place of the original, from a shallow copy of it; None: this one has no such mistake."""
_COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
_OTHER_NAME = {"min": "max", "max": "min", "any": "all", "all": "any"}
_COPIES = ("list", "dict", "set", "tuple", "deepcopy")
_COPYING = ("copy", "clone", "deepcopy")
_SAYS = ("log", "debug", "info", "warning", "error", "exception", "say", "tell", "print", "notice", "warn")
_UNSEEN = ("__repr__", "__str__", "__doc__")


# -- mistakes
def _negate(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Constant):
        node.test = ast.UnaryOp(ast.Not(), node.test)
        return node
    return None


def _compare(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARE:
        node.ops = [_COMPARE[type(node.ops[0])]()]
        return node
    return None


def _off_by_one(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return ast.Constant(node.value + 1)
    return None


def _wrong_constant(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return ast.Constant(not node.value)
    if isinstance(node, ast.Constant) and isinstance(node.value, float) and node.value:
        return ast.Constant(node.value * 10)
    return None


def _arithmetic(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _ARITHMETIC:
        node.op = _ARITHMETIC[type(node.op)]()
        return node
    return None


def _min_max(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _OTHER_NAME:
        node.func = ast.Name(_OTHER_NAME[node.func.id], ast.Load())
        return node
    return None


def _and_or(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.BoolOp):
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return node
    return None


def _drop(node: ast.AST) -> ast.AST | None:
    """A call for what it does, or a change of something that others see."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await):
        return ast.Pass()
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    if targets and all(isinstance(target, ast.Attribute | ast.Subscript) for target in targets):
        return ast.Pass()
    return ast.Pass() if isinstance(node, ast.Delete) else None


def _early_return(node: ast.AST) -> ast.AST | None:
    """Before the last statement of a function that returns nothing."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.body) < 3:
        return None
    if not (isinstance(node.returns, ast.Constant) and node.returns.value is None) or node.name == "__init__":
        return None
    if any(isinstance(inner, ast.Yield | ast.YieldFrom) for inner in ast.walk(node)):
        return None
    node.body = [*node.body[:-1], ast.Return(None)]
    return node


def _swap_arguments(node: ast.AST) -> ast.AST | None:
    """Two of the same form, which a type checker may take for each other."""
    if isinstance(node, ast.Call):
        plain = [i for i, one in enumerate(node.args) if isinstance(one, ast.Name | ast.Attribute)]
        if len(plain) >= 2 and ast.dump(node.args[plain[0]]) != ast.dump(node.args[plain[1]]):
            first, second = plain[:2]
            node.args = list(node.args)
            node.args[first], node.args[second] = node.args[second], node.args[first]
            return node
    return None


def _swap_branches(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.IfExp):
        node.body, node.orelse = node.orelse, node.body
        return node
    if isinstance(node, ast.If) and node.orelse and not isinstance(node.orelse[0], ast.If):
        node.body, node.orelse = node.orelse, node.body
        return node
    return None


def _skip_else(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.If | ast.For | ast.While) and node.orelse:
        node.orelse = []
        return node
    return None


def _alias(node: ast.AST) -> ast.AST | None:
    """No copy is made where one was."""
    if not isinstance(node, ast.Call) or node.keywords:
        return None
    if isinstance(node.func, ast.Name) and node.func.id in _COPIES and len(node.args) == 1:
        return node.args[0] if isinstance(node.args[0], ast.Name | ast.Attribute | ast.Subscript) else None
    if isinstance(node.func, ast.Attribute) and node.func.attr in _COPYING and not node.args:
        return node.func.value
    return None


OPERATORS: dict[str, Change] = {
    "negate a condition": _negate,
    "another comparison": _compare,
    "off by one": _off_by_one,
    "wrong constant": _wrong_constant,
    "another sign": _arithmetic,
    "min for max": _min_max,
    "or for and": _and_or,
    "leave a statement out": _drop,
    "return early": _early_return,
    "swap arguments": _swap_arguments,
    "swap branches": _swap_branches,
    "skip an else": _skip_else,
    "alias instead of a copy": _alias,
}


class Site(NamedTuple):
    operator: str
    number: int
    """Of the node, in the order of `ast.walk`."""
    line: int
    function: str


def sites(text: str) -> list[Site]:
    """Where each mistake can be made, in order."""
    tree = ast.parse(text)
    hidden, owner = _hidden(tree), _owners(tree)
    found = []
    for number, node in enumerate(ast.walk(tree)):
        if id(node) in hidden:
            continue
        for name, change in OPERATORS.items():
            if change(copy.copy(node)) is not None:
                found.append(Site(name, number, getattr(node, "lineno", 0), owner.get(id(node), "")))
    return found


def mutated(text: str, site: Site) -> tuple[str, str]:
    """The module as it is and with the mistake, both as `ast.unparse` writes them."""
    tree = ast.parse(text)
    before = ast.unparse(tree)
    node = next(node for number, node in enumerate(ast.walk(tree)) if number == site.number)
    other = OPERATORS[site.operator](copy.copy(node))
    assert other is not None, "it is a site of this mistake"
    replaced: ast.AST = other

    class Put(ast.NodeTransformer):
        def visit(self, at: ast.AST) -> ast.AST:
            return replaced if at is node else super().generic_visit(at)

    return before, ast.unparse(ast.fix_missing_locations(Put().visit(tree)))


# -- what nobody could notice
def _hidden(tree: ast.Module) -> set[int]:
    hidden: set[int] = set()
    for node in ast.walk(tree):
        for part in _unseen_parts(node):
            hidden.update(id(inner) for inner in ast.walk(part))
    return hidden


def _unseen_parts(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            if node.name in _UNSEEN:
                yield node
            yield from node.decorator_list
            yield from (part for part in [node.returns, *_annotations(node.args)] if part is not None)
        case ast.ClassDef():
            yield from [*node.decorator_list, *node.bases, *node.keywords]
        case ast.AnnAssign():
            yield node.annotation
        case ast.Raise():
            yield node
        case ast.Assert():
            yield node
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            yield node
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            yield node
        case ast.JoinedStr():
            yield node
        case ast.Expr(value=ast.Call(func=func)):
            name = func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""
            if name.lstrip("_") in _SAYS:
                yield node
        case _:
            pass


def _annotations(arguments: ast.arguments) -> list[ast.expr | None]:
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [one.annotation for one in every]


def _owners(tree: ast.Module) -> dict[int, str]:
    """Node -> the function that it is in."""
    found: dict[int, str] = {}

    def walk(node: ast.AST, inside: str) -> None:
        named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        inside = f"{inside}.{node.name}".lstrip(".") if named else inside  # type: ignore[attr-defined]
        found[id(node)] = inside
        for child in ast.iter_child_nodes(node):
            walk(child, inside)

    walk(tree, "")
    return found
