"""``python -m tests.mutants --count 40 --seed 1 --tally out/mutants.jsonl``: mistakes drawn blind, and who notices them.

Each is made in a copy of the files that git knows, never in the working tree. ``--total-s`` is the machine's time for all of them together, ``--budget-s``
for each alone. Who is noticed is in the tally at once, and is not run again; a survivor is there when the time is over. ``--show`` draws, and runs nothing.
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
from typing import Any

from tests.mutants import equivalent
from tests.mutants.ladder import run, rungs_for
from tests.mutants.operators import Site, mutated, sites
from tests.mutants.reach import Reach, places
from tests.mutants.rounds import Climber, climb

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
    path.unlink()  # it may be a link to the file of the tree without the mistake
    path.write_text(mutated(text, site)[1])


def prepare(mutant: Mutant, reach: Reach, well: Path, tree: Path, budget_s: float) -> Climber:
    """In a tree of links to the files of ``well``, but for the module that has the mistake."""
    shutil.copytree(well, tree, symlinks=True, copy_function=os.link)
    plant(mutant, tree)
    code, said = run(tree, (sys.executable, "-c", "import rackrun; print(rackrun.__file__)"), 120)
    if code == 0 and not said.strip().startswith(str(tree)):
        raise SystemExit(f"the copy is not what is imported there, but {said.strip()}")
    module = Path(mutant.module)
    reaching = reach.tests(well, places(well, FOLDERS, module, mutant.line))
    return Climber(tree, rungs_for(tree, module, reaching, budget_s), budget_s)


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


def table(results: list[dict[str, Any]]) -> str:
    known = equivalent.read()
    lines = ["| # | module | function | mistake | noticed by | s |", "|---|---|---|---|---|---|"]
    reasons = 0
    for one in results:
        mutant = one["mutant"]
        assert isinstance(mutant, dict)
        why = "" if one["noticed"] else equivalent.why(mutant, known)
        reasons += bool(why)
        by = f"{one['rung']}: {one['by']}" if one["noticed"] else f"equivalent: {why}" if why else "**nobody**"
        lines.append(
            f"| {mutant['number']} | {mutant['module']}:{mutant['line']} | {mutant['function']} | {mutant['operator']} "
            f"| {by} | {one['seconds']} |"
        )
    rungs = Counter(str(one["rung"]) for one in results if one["noticed"])
    lines.append(f"\n{sum(rungs.values())} of {len(results)} noticed, {reasons} equivalent: {dict(rungs)}")
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
    parser.add_argument("--total-s", type=float, default=600.0, help="of the machine, for all together")
    parser.add_argument("--jobs", type=int, default=2, help="runs of tests at once")
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
    with tempfile.TemporaryDirectory(prefix="rackrun-mutants-") as folder, given.tally.open("a", buffering=1) as tally:
        well = Path(folder) / "well"
        copy_tree(well)
        mutants = [draw(given.seed, number, well) for number in numbers if (given.seed, number) not in known]
        reach, changes_nothing = Reach(given.tally.with_suffix(".reach")), equivalent.read()
        reach.learn(well, FOLDERS, given.jobs)
        climbers = []
        for mutant in mutants:
            tree = Path(folder) / str(mutant.number)
            is_equivalent = equivalent.why(asdict(mutant), changes_nothing)
            climbers.append(
                Climber(tree, (), 0.0) if is_equivalent else prepare(mutant, reach, well, tree, given.budget_s)
            )

        def keep(mutant: Mutant, climber: Climber) -> None:
            result = asdict(Result(mutant, bool(climber.by), climber.by, climber.rung, climber.seconds))
            tally.write(json.dumps(result) + "\n")
            results.append(result)
            print(f"{mutant.number} {climber.rung or 'NOBODY'}: {climber.by} {climber.seconds} s", flush=True)

        owners = {one.tree: mutant for one, mutant in zip(climbers, mutants, strict=True)}
        took_s = climb(climbers, well, given.total_s, given.jobs, lambda one: keep(owners[one.tree], one))
        for one in climbers:
            if not one.by:
                keep(owners[one.tree], one)
    print(f"{took_s:.0f} s of the machine, {given.jobs} runs of tests at once")
    print(table(sorted(results, key=lambda one: one["mutant"]["number"])))


if __name__ == "__main__":
    main()
