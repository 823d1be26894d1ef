"""python -m tests.strangers --seeds 0:300 --tally out/strangers.jsonl [--only ema,gan] [--limit MINUTES] [--references] [--again SEED] [--hard]

For each seed: a script, who is lost, where in the script, when. One line of the tally for each; what is in it is not run again. A run that is not as it must be keeps its folder
in TALLY.runs, with command.txt, output.txt and orders.json. Exit code 1 where a verdict is bad.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import signal
import sys
import time
from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.strangers.hard import HARD, Hard
from tests.strangers.job import ROOT, SCRIPTS, Fault, Outcome, Setting, run_job, setting_of
from tests.strangers.places import find_places
from tests.strangers.verdict import Verdict, difference, inconsistency, last_words, steps_said, without_faults

WHAT = (("kill", 55), ("stop", 20), ("spin", 9), ("sleep", 11), ("gil", 5))


def scripts() -> list[Path]:
    """In an order of no meaning, so that a few seeds in a row are of several kinds."""
    paths = [path for path in SCRIPTS.glob("*.py") if path.stem != "record"]
    return sorted(paths, key=lambda path: hashlib.sha256(path.stem.encode()).hexdigest())


class Campaign:
    def __init__(self, tally: Path, limit_s: float) -> None:
        self.runs = tally.with_name(tally.name + ".runs")
        self.limit_s = limit_s
        self._version = code_digest()

    def reference(self, script: Path, spares: int = 0) -> tuple[Outcome, list[dict[str, Any]], Verdict, str]:
        """The run without faults: what it said, and who came to which line when. Once for each text of a script and of rackrun."""
        setting = setting_of(script)
        text = script.read_bytes() + (SCRIPTS / "record.py").read_bytes() + self._version
        kept = self.runs / "references" / f"{script.stem}-{spares}-{hashlib.sha256(text).hexdigest()[:12]}"
        facts = kept / "outcome.json"
        if not facts.exists():
            outcome = run_job(script, kept, spares=spares, profile=True, limit_s=self.limit_s)
            facts.write_text(json.dumps(asdict(outcome) | {"lines": None}))
        row = json.loads(facts.read_text())
        said, seen = kept / "said.jsonl", kept / "profile.jsonl"
        outcome = Outcome(
            **row | {"lines": [json.loads(line) for line in said.read_text().splitlines()] if said.exists() else []}
        )
        profile = [json.loads(line) for line in seen.read_text().splitlines()] if seen.exists() else []
        return outcome, profile, *without_faults(outcome, script, setting.expect)

    def run(self, seed: int | str, script: Path, hard: Hard | None = None) -> dict[str, Any]:
        setting = setting_of(script)
        reference, profile, verdict, words = self.reference(script)
        row: dict[str, Any] = {"seed": seed, "script": script.stem, "spares": 0, "faults": []}
        if verdict is not Verdict.EQUAL:
            return row | {"verdict": verdict, "words": words, "seconds": round(reference.seconds, 1)}
        spares, faults = (hard.spares, (hard.fault(),)) if hard else draw(seed, script, setting, profile)
        return row | self.strike(script, spares, faults, self.runs / f"{seed}-{script.stem}")

    def strike(self, script: Path, spares: int, faults: tuple[Fault, ...], out: Path) -> dict[str, Any]:
        setting = setting_of(script)
        reference, _, _, _ = self.reference(script)
        outcome = run_job(script, out, spares=spares, faults=faults, limit_s=self.limit_s)
        verdict, words = judge(script, setting, spares, reference, outcome)
        if verdict is Verdict.WRONG:
            again = run_job(script, out / "again", spares=0, limit_s=self.limit_s)
            if other := difference(reference.lines, again.lines, exact=True, same_world=True):
                verdict, words = Verdict.UNSTEADY, f"two runs without faults: {other}"
        if verdict.good:
            shutil.rmtree(out)
        return {
            "spares": spares,
            "faults": [str(fault) for fault in faults],
            "orders": [asdict(fault) for fault in faults],
            "verdict": verdict,
            "words": words,
            "seconds": round(outcome.seconds, 1),
        }


def judge(script: Path, setting: Setting, spares: int, reference: Outcome, outcome: Outcome) -> tuple[Verdict, str]:
    tail = last_words(outcome.output)
    if outcome.code is None:
        return Verdict.HUNG, f"{steps_said(outcome.lines)} steps in {outcome.seconds:.0f} s: {tail}"
    exact = spares > 0 or setting.plain or 'reduction="exact' in script.read_text()
    same_world = len(outcome.struck) <= spares or setting.plain
    if words := difference(reference.lines, outcome.lines, exact=exact, same_world=same_world):
        wrong = not words.endswith("never said") or outcome.code == 0
        if wrong and (same_world or exact or setting.shrinks):
            return Verdict.WRONG, words
    if outcome.code != 0:
        lost = len(outcome.struck)
        beyond = lost > spares and not (setting.plain or (setting.shrinks and lost < setting.ranks))
        return (
            Verdict.BEYOND if beyond and outcome.code == 3 else Verdict.NEEDLESS_END,
            f"exit code {outcome.code}: {tail}",
        )
    if outcome.left:
        return Verdict.LEFT, "; ".join(outcome.left)
    if exact and (words := inconsistency(outcome.lines)):
        return Verdict.WRONG, words
    if not outcome.struck:
        return Verdict.MISSED, "no fault struck"
    return Verdict.EQUAL if exact else Verdict.NEAR, ""


def draw(
    seed: int | str, script: Path, setting: Setting, profile: list[dict[str, Any]]
) -> tuple[int, tuple[Fault, ...]]:
    """Spares and faults of a seed. Only such lines are drawn as the rank came to without faults."""
    chance = random.Random(f"{seed}-{script.stem}")
    of, lines = find_places(script).of, script.read_text().splitlines()
    by_place: dict[str, list[tuple[int, int, int, int]]] = defaultdict(list)
    for row in profile:
        for line, visits in row["visits"].items():
            if row["rank"] >= 0 and (
                row["unit"] >= 0 or (setting.plain and lines[int(line) - 1].startswith("        "))
            ):
                by_place[of.get(int(line), "helper")].append((row["rank"], row["unit"], int(line), visits))
    count = 2 if chance.random() < 0.35 else 1
    spares = 2 if count == 2 else chance.choice((1, 1, 2))
    if setting.plain:
        count, spares = 1, 0
    if setting.shrinks and count == 1 and chance.random() < 0.25:
        spares = 0
    faults: list[Fault] = []
    for number in range(count):
        place = chance.choice(sorted(by_place))
        candidates = sorted(by_place[place])
        if number and chance.random() < 0.4:  # at about the same time, another rank
            near = [row for row in candidates if abs(row[1] - faults[0].unit) <= 1 and row[0] != faults[0].rank]
            candidates = near or candidates
        elif chance.random() < 0.25:  # while nothing is known yet
            candidates = [row for row in candidates if row[1] <= 2] or candidates
        wanted = chance.randrange(setting.ranks)
        candidates = [row for row in candidates if row[0] == wanted] or candidates
        rank, unit, line, visits = chance.choice(candidates)
        what = chance.choices([name for name, _ in WHAT], [weight for _, weight in WHAT])[0]
        goes_on = round(chance.choice((0.1, 0.5, 3.0)), 1) if what == "stop" and chance.random() < 0.5 else None
        delay = round(chance.uniform(0.001, 0.03), 4) if what in {"kill", "stop"} and chance.random() < 0.3 else 0.0
        faults.append(Fault(number, what, rank, unit, line, chance.randint(1, visits), place, delay, goes_on))
    return spares, tuple(faults)


def code_digest() -> bytes:
    digest = hashlib.sha256()
    for folder in ("rackrun", "topology", "checkpoint"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.digest()


def summary(rows: list[dict[str, Any]]) -> str:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        counts[row["script"]][row["verdict"]] += 1
    verdicts = [str(verdict) for verdict in Verdict if any(counter[verdict] for counter in counts.values())]
    wide = max([len(name) for name in counts], default=6)
    counts["all"] = sum(counts.values(), Counter())
    lines = [f"{'script':{wide}}  " + "  ".join(verdicts)]
    for name in [*sorted(set(counts) - {"all"}), "all"]:
        cells = [f"{counts[name][verdict] or '':>{len(verdict)}}" for verdict in verdicts]
        lines.append(f"{name:{wide}}  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def again(campaign: Campaign, rows: list[dict[str, Any]]) -> int:
    bad = 0
    for row in rows:
        faults = tuple(Fault(**order) for order in row["orders"])
        out = campaign.runs / f"again-{row['seed']}-{row['script']}"
        new = campaign.strike(SCRIPTS / f"{row['script']}.py", row["spares"], faults, out)
        print(
            f"{row['script']:22} {new['verdict']:13} (was {row['verdict']})  {'; '.join(new['faults'])}\n       {new['words']}"
        )
        bad += not Verdict(new["verdict"]).good
    return 1 if bad or not rows else 0


def wanted(name: str, parts: list[str]) -> bool:
    """A part that is the whole name of some script means that script alone."""
    return any(name == part or (part in name and not (SCRIPTS / f"{part}.py").exists()) for part in parts)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.strangers", description=__doc__)
    parser.add_argument("--seeds", default="0:50", help="FROM:TO")
    parser.add_argument("--tally", type=Path, default=Path("out/strangers.jsonl"))
    parser.add_argument("--only", default="", help="names of scripts, or parts of them, with commas")
    parser.add_argument("--limit", type=float, default=1e9, help="minutes; no run begins after them")
    parser.add_argument("--seconds", type=float, default=120.0, help="a run may take")
    parser.add_argument(
        "--again", type=int, metavar="SEED", help="this line of the tally once more, with its own faults"
    )
    parser.add_argument("--hard", action="store_true", help="the faults of hard.py instead of drawn ones")
    parser.add_argument("--references", action="store_true", help="only the runs without faults, of all scripts")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run in hand is ended, too
    first, _, end = args.seeds.partition(":")
    chosen = [path for path in scripts() if not args.only or wanted(path.stem, args.only.split(","))]
    args.tally = args.tally.resolve()
    args.tally.parent.mkdir(parents=True, exist_ok=True)
    campaign = Campaign(args.tally, args.seconds)
    rows = [json.loads(line) for line in args.tally.read_text().splitlines()] if args.tally.exists() else []
    done = {(row["seed"], row["script"]) for row in rows}
    if args.again is not None:
        return again(campaign, [row for row in rows if row["seed"] == args.again and row.get("orders")])
    until = time.monotonic() + 60 * args.limit
    mine: list[dict[str, Any]] = []
    cases = {f"hard {hard.why}": hard for hard in HARD}
    work: list[tuple[int | str, Path]]
    if args.references:
        work = [(-1, path) for path in chosen]
    elif args.hard:
        work = [(name, SCRIPTS / f"{hard.script}.py") for name, hard in cases.items()]
        work = [(name, path) for name, path in work if path in chosen]
    else:
        work = [(seed, chosen[seed % len(chosen)]) for seed in range(int(first), int(end))]
    for seed, script in work:
        if (seed, script.stem) in done:
            mine += [row for row in rows if (row["seed"], row["script"]) == (seed, script.stem)]
            continue
        if time.monotonic() > until:
            break
        if args.references:
            outcome, _, verdict, words = campaign.reference(script)
            row: dict[str, Any] = {
                "seed": -1,
                "script": script.stem,
                "verdict": verdict,
                "words": words,
                "seconds": round(outcome.seconds, 1),
                "faults": [],
            }
        else:
            row = campaign.run(seed, script, cases.get(str(seed)))
            with args.tally.open("a") as file:
                file.write(json.dumps(row) + "\n")
        mine.append(row)
        print(
            f"{seed if isinstance(seed, int) else 'hard':>4} {row['script']:22} {row['verdict']:13} {row['seconds']:6.1f} s  {'; '.join(row['faults'])}",
            flush=True,
        )
        if row["words"] and (args.references or not Verdict(row["verdict"]).good):
            print(f"       {row['words']}", flush=True)
    print(summary(mine))
    return 0 if all(Verdict(row["verdict"]).good for row in mine) else 1


if __name__ == "__main__":
    sys.exit(main())
