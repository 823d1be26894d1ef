"""Where in a script its lines are: in the loader, the forward, before or after the update, between steps, in a phase, after the loop."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path

UPDATE = re.compile(r"\b(?!\w*(?:sched|plateau))\w+(\[\w+\])?\.(step|first_step|second_step)\(")


@dataclass
class Places:
    """Of one script. ``of[line]`` is the name of the place."""

    main: str
    loop_variable: str
    loop_ends: int
    step_functions: dict[str, str]
    of: dict[int, str] = field(default_factory=dict)


def find_places(script: Path) -> Places:
    """A script without ``@rackrun.elastic`` has one place, anywhere. Raises ValueError where there is neither a loop
    over ``run.steps`` nor one of ``run.do``, which counts its steps in a variable ``step``."""
    text = script.read_text()
    lines = text.splitlines()
    tree = ast.parse(text)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    mains = [node for node in functions if decorated(node, "elastic")]
    if not mains:
        return Places("", "", len(lines), {}, dict.fromkeys(range(1, len(lines) + 1), "anywhere"))
    main = mains[0]
    loops = [
        node for node in ast.walk(main) if isinstance(node, ast.For) and ast.unparse(node.iter).find("run.steps(") >= 0
    ]
    calls = [node for node in ast.walk(main) if isinstance(node, ast.Call) and node.args]
    done = {ast.unparse(node.args[0]) for node in calls if ast.unparse(node.func) == "run.do"}
    driven = [node for node in ast.walk(main) if isinstance(node, ast.While)] if done else []
    if not loops and not driven:
        raise ValueError(f"{script}: no loop over run.steps")
    loop: ast.For | ast.While = (loops or driven)[0]
    steps = {node.name: node.args.args[0].arg for node in functions if decorated(node, "run.step") or node.name in done}
    variable = ast.unparse(loop.target) if isinstance(loop, ast.For) else "step"
    places = Places(main.name, variable, loop.end_lineno or loop.lineno, steps)
    phases = {
        ast.unparse(node.args[-1]) for node in calls if re.search(r"run\.(every|at_end|phase)$", ast.unparse(node.func))
    }
    for node in functions:  # outer ones come first, so that inner ones have the last word
        begins = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        span = range(begins, (node.end_lineno or node.lineno) + 1)
        if node is main:
            for line in span:
                places.of[line] = "before" if line < loop.lineno else "between" if line <= places.loop_ends else "after"
        elif node.name in steps:
            place = "step begins"
            for line in span:
                if UPDATE.search(lines[line - 1]):
                    place = "update"
                elif place == "update":
                    place = "after the update"
                elif "backward(" in lines[line - 1] and place != "after the update":
                    place = "backward"
                elif place == "backward":
                    place = "before the update"
                places.of[line] = place
        else:
            place = (
                "phase" if node.name in phases
                else "loader" if re.search("getitem|collate", node.name)
                else "forward" if node.name == "forward"
                else "helper"
            )  # fmt: skip
            places.of.update(dict.fromkeys(span, place))
    return places


def decorated(node: ast.FunctionDef, name: str) -> bool:
    return any(name in ast.unparse(decorator) for decorator in node.decorator_list)
