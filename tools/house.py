"""How a tree of this repository is built, in figures: ``python tools/house.py [TREE ...]`` (by default this one), a column for each tree.

lines           of code: without docstrings, comments and blank lines
statements      of code, docstrings apart: the same however wide a line may be
modules a room  files beside each other in one folder of ``rackrun``: the most, and where
arrows          pairs of rooms of the core, or of modules where it has none, of which one imports the other, at whatever place in the file
floors          the longest way down along them; a cycle counts as one floor
callbacks       attributes and parameters of the core that are called, by their annotation (``Callable``)
timers          timers of the core whose names are strings with something in them
files           in which a class is named, on average, its own file included: an event, a command, a chaos fault
twice           public class names that more than one module has
silent, "Of"    public functions without a docstring; docstrings that begin with "Of"
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import TypeGuard

HERE = Path(__file__).resolve().parents[1]
PACKAGES = (
    "agent",
    "chaos",
    "checkpoint",
    "coordinator",
    "core",
    "ctl",
    "launch",
    "link",
    "pages",
    "protocol",
    "topology",
    "worker",
)
_BASES = ("_Event", "OfWorker", "_Command", "_Fault", "BaseFault")
"""The bases of events, commands and faults, in older trees and in this one."""


class Module:
    """One file of ``rackrun``, under its name as a module."""

    def __init__(self, path: Path, name: str) -> None:
        self.name, self.is_package = name, path.name == "__init__.py"
        self.text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)

    @property
    def lines(self) -> int:
        """Of code."""
        return len(_lines_with_code(self.text) - _docstring_lines(self.tree))

    def imported(self) -> set[str]:
        found = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        return found

    def classes(self) -> list[ast.ClassDef]:
        return [node for node in self.tree.body if isinstance(node, ast.ClassDef)]

    def statements(self) -> int:
        return sum(isinstance(node, ast.stmt) and not _is_docstring(node) for node in ast.walk(self.tree))

    def names_of(self, packages: Collection[str]) -> set[str]:
        """Names that the module defines as one of ``packages``, or imports from one of them."""
        found = {one.name for one in self.classes()} if _below(self.name, packages) else set()
        modules = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = {alias.asname or alias.name: alias.name for alias in node.names}
                modules |= {name for name, what in names.items() if _below(f"{node.module}.{what}", packages)}
                found |= {*names.values()} if _below(node.module, packages) else set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                found.add(node.attr)
        return found


def _below(name: str, packages: Collection[str]) -> bool:
    """Whether a module is one of ``packages``, or is in one."""
    return any(name == one or name.startswith(f"{one}.") for one in packages)


def modules_of(folder: Path, package: str) -> list[Module]:
    """Of ``folder``, by their names as of ``package``. Links are followed: three packages lie at the top of the repository."""
    found = []
    for path in sorted(_python_files(folder)):
        parts = path.relative_to(folder).with_suffix("").parts
        found.append(Module(path, ".".join((package, *(parts[:-1] if parts[-1] == "__init__" else parts)))))
    return found


def _python_files(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.name.startswith((".", "__pycache__")):
            continue
        if path.is_dir():
            yield from _python_files(path)
        elif path.suffix == ".py":
            yield path


def _lines_with_code(text: str) -> set[int]:
    empty = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in empty:
            found |= set(range(token.start[0], token.end[0] + 1))
    return found


def _docstring_lines(tree: ast.Module) -> set[int]:
    """Also those below an attribute."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if _is_docstring(node):
            found |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def _is_docstring(node: ast.AST) -> TypeGuard[ast.Expr]:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


# -- what is measured --------------------------------------------------------------------------------------------------
def figures(tree: Path) -> dict[str, str]:
    product = modules_of(tree / "rackrun", "rackrun")
    of_package = defaultdict(list)
    for module in product:
        package = module.name.split(".")[1] if module.name.count(".") else ""
        of_package[package if package in PACKAGES else "the rest"].append(module)
    tests = modules_of(tree / "tests", "tests")
    core = [module for module in of_package["core"] if module.name != "rackrun.core"]
    arrows = _arrows(core)
    found = {"lines of product code": str(sum(module.lines for module in product))}
    found |= {f"  {name}": str(sum(module.lines for module in of_package[name])) for name in (*PACKAGES, "the rest")}
    found["lines of test code"] = str(sum(module.lines for module in tests))
    found["statements of product code"] = str(sum(module.statements() for module in product))
    found["modules a room, at most"] = _rooms(product)
    found["arrows inside the core"] = str(sum(map(len, arrows.values())))
    found["floors of the core"] = str(_floors(arrows))
    found["callbacks of the core"] = str(sum(map(_callbacks, core)))
    found["timers with names to be parsed"] = str(sum(map(_parsed_timers, core)))
    found |= {f"files that name {what}": count for what, count in _named_things(product).items()}
    found["class names used twice"] = _twice(product)
    found["public functions without a docstring"] = _silent(product)
    found['docstrings that begin with "Of"'] = str(sum(_begins_with_of(module) for module in product))
    return found


def _rooms(modules: list[Module]) -> str:
    rooms = Counter(module.name.rpartition(".")[0] for module in modules if not module.is_package)
    (where, most), *_ = rooms.most_common(1)
    return f"{most} ({where}); more than 10 in {sum(count > 10 for count in rooms.values())} of {len(rooms)}"


def _arrows(core: list[Module]) -> dict[str, set[str]]:
    """Room, or module -> those that it imports from."""
    names = {module.name for module in core}

    def room(name: str) -> str:
        parts = name.split(".")
        return ".".join(parts[:3])

    arrows: dict[str, set[str]] = {room(name): set() for name in names}
    for module in core:
        for imported in module.imported() & names:
            if room(imported) != room(module.name):
                arrows[room(module.name)].add(room(imported))
    return arrows


def _floors(arrows: Mapping[str, set[str]]) -> int:
    groups = _cycles(arrows)
    of = {name: number for number, group in enumerate(groups) for name in group}
    height: dict[int, int] = {}
    for number, group in enumerate(groups):  # what is imported comes first
        below = {of[target] for name in group for target in arrows[name]} - {number}
        height[number] = 1 + max((height[one] for one in below), default=0)
    return max(height.values(), default=0)


def _cycles(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """Strongly connected components, those that are imported first (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in sorted(arrows[name]):
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            at = stack.index(name)
            found.append(stack[at:])
            del stack[at:]

    for name in sorted(arrows):
        if name not in index:
            visit(name)
    return found


def _callbacks(module: Module) -> int:
    """Attributes of classes, and parameters of ``__init__``, that are `Callable`, or of a Protocol that can be called."""
    called = {one.name for one in module.classes() if any(_name(part) == "__call__" for part in one.body)}
    found = 0
    for one in module.classes():
        if one.name in called:
            continue
        for part in one.body:
            if isinstance(part, ast.AnnAssign):
                found += _is_callable(part.annotation, called)
            elif isinstance(part, ast.FunctionDef) and part.name == "__init__":
                arguments = (*part.args.args, *part.args.kwonlyargs)
                found += sum(_is_callable(one.annotation, called) for one in arguments if one.annotation)
    return found


def _is_callable(annotation: ast.expr, called: set[str]) -> bool:
    names = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}
    return bool(names & {"Callable", *called})


def _name(node: ast.stmt) -> str:
    return node.name if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) else ""


def _parsed_timers(module: Module) -> int:
    calls = [node for node in ast.walk(module.tree) if isinstance(node, ast.Call)]
    timers = [call for call in calls if isinstance(call.func, ast.Name) and "Timer" in call.func.id]
    given = [part for call in timers for part in (*call.args, *(word.value for word in call.keywords))]
    return sum(isinstance(part, ast.JoinedStr) for part in given)


def _named_things(modules: list[Module]) -> dict[str, str]:
    """What somebody adds one of: an event, a command, a chaos fault -> in how many files its class is named."""
    protocol = ("rackrun.protocol.events", "rackrun.protocol.commands")
    return {
        "an event": _files(modules, protocol[:1]),
        "a command": _files(modules, protocol[1:]),
        "a chaos fault": _files(modules, ("rackrun.chaos.faults",), exported=("rackrun.chaos",)),
    }


def _files(modules: list[Module], packages: Collection[str], exported: Collection[str] = ()) -> str:
    """Return in how many files the classes of ``packages`` are named, which may be imported from ``exported`` too."""
    classes = [one for module in modules if _below(module.name, packages) for one in module.classes()]
    of_bases = [one.name for one in classes if {getattr(base, "id", "") for base in one.bases} & {*_BASES}]
    known = {name for name in of_bases if name not in _BASES}
    named = [module.names_of(packages) | (_exports(module, exported) & known) for module in modules]
    counts = [sum(name in names for names in named) for name in known]
    return f"{mean(counts):.1f} ({len(known)} of them, at most {max(counts)})" if counts else "there are none"


def _exports(module: Module, packages: Collection[str]) -> set[str]:
    """Names that the module imports from one of ``packages`` itself."""
    nodes = [node for node in ast.walk(module.tree) if isinstance(node, ast.ImportFrom) and node.module in packages]
    return {alias.name for node in nodes for alias in node.names}


def _twice(modules: list[Module]) -> str:
    where = defaultdict(set)
    for module in modules:
        for one in module.classes():
            if not one.name.startswith("_"):
                where[one.name].add(module.name)
    found = sorted(name for name, places in where.items() if len(places) > 1)
    return f"{len(found)}" + (f" ({', '.join(found[:3])}, ...)" if len(found) > 3 else "")


def _silent(modules: list[Module]) -> str:
    functions = [
        node
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_")
    ]
    return f"{sum(ast.get_docstring(node) is None for node in functions)} of {len(functions)}"


def _begins_with_of(module: Module) -> int:
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    told = [ast.get_docstring(node) or "" for node in ast.walk(module.tree) if isinstance(node, holders)]
    return sum(text.startswith("Of ") for text in told)


def main(trees: list[Path]) -> None:
    columns = [figures(tree) for tree in trees]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [["", *(str(tree) for tree in trees)]] if len(trees) > 1 else []
    rows += [[name, *(column.get(name, "") for column in columns)] for name in names]
    widths = [max(len(row[at]) for row in rows) for at in range(len(columns) + 1)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main([Path(tree) for tree in sys.argv[1:]] or [HERE])
