"""``python -m tests.mutants --count 40 --seed 1 --tally out/mutants.jsonl``: mistakes drawn blind, and who notices them.

Each is made in a copy of the files that git knows, never in the working tree. What the tally has already is not drawn again, so it can be ended at any time.
``--show`` draws, and runs nothing.
"""

from __future__ import annotations

import argparse
import difflib
import json
import marshal
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.mutants.ladder import climb, run, rungs_for
from tests.mutants.operators import Site, mutated, sites

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("rackrun/core", "rackrun/worker", "checkpoint")


@dataclass(frozen=True)
class Mutant:
    seed: int
    number: int
    module: str
    operator: str
    line: int
    function: str
    diff: str


@dataclass(frozen=True)
class Result:
    mutant: Mutant
    noticed: bool
    by: str
    rung: str
    seconds: float


def draw(seed: int, number: int, root: Path = ROOT) -> Mutant:
    """A module by its length, a kind of mistake, a place: from the seed and the number alone, and the text of the modules."""
    modules = sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py") if path.name != "__init__.py")
    draws = random.Random(f"{seed}/{number}")
    while True:
        module = draws.choices(modules, weights=[path.stat().st_size for path in modules])[0]
        text = module.read_text()
        places: dict[str, list[Site]] = {}
        for site in sites(text):
            places.setdefault(site.operator, []).append(site)
        if not places:
            continue
        site = draws.choice(places[draws.choice(sorted(places))])
        before, after = mutated(text, site)
        if before == after or _code(before) == _code(after):
            continue
        lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=1)
        return Mutant(
            seed,
            number,
            str(module.relative_to(root)),
            site.operator,
            site.line,
            site.function,
            "\n".join(list(lines)[2:]),
        )


def plant(mutant: Mutant, tree: Path) -> None:
    path = tree / mutant.module
    text = path.read_text()
    site = next(
        one
        for one in sites(text)
        if (one.operator, one.line, one.function) == (mutant.operator, mutant.line, mutant.function)
        and _diff(*mutated(text, one)) == mutant.diff
    )
    path.write_text(mutated(text, site)[1])


def try_out(mutant: Mutant, well: Path, budget_s: float) -> Result:
    with tempfile.TemporaryDirectory(prefix="rackrun-mutant-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(well, tree, symlinks=True)
        plant(mutant, tree)
        code, said = run(tree, (sys.executable, "-c", "import rackrun; print(rackrun.__file__)"), 120)
        if code == 0 and not said.strip().startswith(str(tree)):
            raise SystemExit(f"the copy is not what is imported there, but {said.strip()}")
        noticed = climb(tree, rungs_for(tree, Path(mutant.module), budget_s), well, budget_s)
    return Result(mutant, bool(noticed.by), noticed.by, noticed.rung, noticed.seconds)


def copy_tree(to: Path) -> None:
    """What git knows, as it stands now, and what is new and not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout
    for name in filter(None, listed.decode().split("\0")):
        source, target = ROOT / name, to / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(os.readlink(source))
        elif source.is_file():
            shutil.copy2(source, target)


def table(results: list[dict[str, object]]) -> str:
    lines = ["| # | module | function | mistake | noticed by | s |", "|---|---|---|---|---|---|"]
    for one in results:
        mutant = one["mutant"]
        assert isinstance(mutant, dict)
        by = f"{one['rung']}: {one['by']}" if one["noticed"] else "**nobody**"
        lines.append(
            f"| {mutant['number']} | {mutant['module']}:{mutant['line']} | {mutant['function']} | {mutant['operator']} "
            f"| {by} | {one['seconds']} |"
        )
    rungs = Counter(str(one["rung"]) for one in results if one["noticed"])
    lines.append(f"\n{sum(rungs.values())} of {len(results)} noticed: {dict(rungs)}")
    return "\n".join(lines)


def _code(text: str) -> bytes:
    return marshal.dumps(compile(text, "m", "exec", optimize=2))


def _diff(before: str, after: str) -> str:
    return "\n".join(list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=1))[2:])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--budget-s", type=float, default=600.0, help="for each, at the most")
    parser.add_argument("--tally", type=Path, default=ROOT / "out" / "mutants.jsonl")
    parser.add_argument("--show", action="store_true", help="draw, and run nothing")
    given = parser.parse_args()
    numbers = range(given.first, given.first + given.count)
    if given.show:
        for number in numbers:
            mutant = draw(given.seed, number)
            print(f"# {number} {mutant.module}:{mutant.line} {mutant.function}: {mutant.operator}\n{mutant.diff}\n")
        return
    given.tally.parent.mkdir(parents=True, exist_ok=True)
    lines = given.tally.read_text().splitlines() if given.tally.exists() else []
    results = [json.loads(line) for line in lines]
    known = {(one["mutant"]["seed"], one["mutant"]["number"]) for one in results}
    os.nice(10)
    with tempfile.TemporaryDirectory(prefix="rackrun-well-") as folder:
        well = Path(folder) / "tree"
        copy_tree(well)
        for number in numbers:
            if (given.seed, number) in known:
                continue
            mutant = draw(given.seed, number, well)
            print(f"# {number} {mutant.module}:{mutant.line} {mutant.function}: {mutant.operator}", flush=True)
            result = asdict(try_out(mutant, well, given.budget_s))
            print(
                f"  {result['rung']}: {result['by']}" if result["noticed"] else "  NOBODY",
                result["seconds"],
                flush=True,
            )
            with given.tally.open("a") as file:
                file.write(json.dumps(result) + "\n")
            results.append(result)
    print(table(sorted(results, key=lambda one: one["mutant"]["number"])))


if __name__ == "__main__":
    main()
