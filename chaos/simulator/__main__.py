"""``python -m rackrun.chaos.simulator``: ``fuzz --seeds 0:1000``, ``show SEED``, ``measure``."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec

from rackrun.chaos.plan.definition import write_plan
from rackrun.chaos.simulator.base.coverage_marks import MARKS
from rackrun.chaos.simulator.cluster.simulation import SimulationOutcome
from rackrun.chaos.simulator.core_benchmark import measure
from rackrun.chaos.simulator.fuzzing.draw_job import draw_job
from rackrun.chaos.simulator.fuzzing.fuzz import CHUNK, Tally, play, reduce, sweep

LAST = 12


class _Line(msgspec.Struct, omit_defaults=True):
    """A line of the tally file: the results of a range of seeds."""

    start: int
    stop: int
    core_events: int
    exits: dict[str, int]
    marks: dict[str, int]
    failed: dict[int, str] = {}


def _read(path: Path | None) -> dict[tuple[int, int], _Line]:
    if path is None or not path.exists():
        return {}
    whole = path.read_bytes().rpartition(b"\n")
    with path.open("r+b") as file:
        file.truncate(len(whole[0]) + len(whole[1]))  # cuts off an incomplete last line
    found = [msgspec.json.decode(line, type=_Line) for line in whole[0].splitlines()]
    return {(line.start, line.stop): line for line in found}


def _tally(line: _Line) -> Tally:
    return Tally(line.stop - line.start, line.core_events, Counter(line.exits), Counter(line.marks), dict(line.failed))


def _fuzz(args: argparse.Namespace) -> int:
    seeds = args.seeds
    known = _read(args.tally)
    total, todo = Tally(), []
    for at in range(seeds.start, seeds.stop, CHUNK):
        chunk = range(at, min(at + CHUNK, seeds.stop))
        line = known.get((chunk.start, chunk.stop))
        if line is None:
            todo.append(chunk)
        else:
            total.merge(_tally(line))
    print(f"{total.seeds} of {len(seeds)} seeds are known already") if total.seeds else None
    began, done = time.monotonic(), 0
    for chunk, tally in sweep(todo, args.jobs):
        total.merge(tally)
        done += tally.seeds
        if args.tally is not None:
            line = _Line(chunk.start, chunk.stop, tally.core_events, dict(tally.exits), dict(tally.marks), tally.failed)
            with args.tally.open("ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")
        for seed, what in tally.failed.items():
            print(f"seed {seed}: {what}", flush=True)
    seconds = max(time.monotonic() - began, 1e-9)
    if done:
        print(f"{done} seeds in {seconds:.1f} s, {done / seconds:.0f} a second")
    exits = ", ".join(f"{count} with {code}" for code, count in sorted(total.exits.items()))
    print(f"{total.seeds} seeds, {total.core_events} core events; ended: {exits}; failed: {len(total.failed)}")
    never = [mark for mark in MARKS if not total.marks[mark]]
    print(f"never seen: {', '.join(never)}" if never else f"all {len(MARKS)} marks were seen")
    if total.failed:
        _tell(min(total.failed))
    return 1 if total.failed else 0


def _tell(seed: int) -> None:
    """Print everything about a seed that fails, with as few faults as still fail."""
    reduced = reduce(seed)
    job, outcome = reduced if reduced is not None else (draw_job(seed), play(seed))
    print(f"\nseed {seed}, {'reduced' if reduced else 'which does not fail by its resolved plan, so whole'}:")
    print(write_plan(job.plan))
    print(f"{msgspec.json.encode(job.config).decode()}\n{_of(outcome)}")


def _of(outcome: SimulationOutcome) -> str:
    lines = [*(line[:600] for line in outcome.last[-LAST:])]
    if outcome.stopped is not None:
        lines.append(f"exit {outcome.stopped.exit_code}: {outcome.stopped.because}")
    lines.append(f"{outcome.violation or 'all was as it must be'} (trace {outcome.trace})")
    return "\n".join(lines)


def _show(args: argparse.Namespace) -> int:
    outcome = play(args.seed)
    if outcome.violation:
        _tell(args.seed)
        return 1
    print(write_plan(draw_job(args.seed).plan))
    print(_of(outcome))
    return 0


def _measure(args: argparse.Namespace) -> int:
    for ranks in args.ranks:
        for cost in measure(ranks):
            print(cost, flush=True)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Return 0 if no seed failed, 1 if one did."""
    parser = argparse.ArgumentParser(prog="python -m rackrun.chaos.simulator", description=__doc__)
    commands = parser.add_subparsers(required=True)
    fuzz = commands.add_parser("fuzz", help="play many seeds")
    fuzz.add_argument("--seeds", type=_seeds, default="0:1000", metavar="A:B", help="from A up to, but without, B")
    fuzz.add_argument("--jobs", type=int, default=1, help="processes")
    fuzz.add_argument("--tally", type=Path, help="keep what is done in this file, and go on from there")
    fuzz.set_defaults(run=_fuzz)
    show = commands.add_parser("show", help="play one seed, and tell of it")
    show.add_argument("seed", type=int)
    show.set_defaults(run=_show)
    costs = commands.add_parser("measure", help="what the core itself costs")
    costs.add_argument("--ranks", type=int, nargs="+", default=[64, 4000])
    costs.set_defaults(run=_measure)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except (OSError, msgspec.MsgspecError) as error:
        parser.error(f"{error}. Remedy: choose another --tally.")


def _seeds(text: str) -> range:
    first, colon, end = text.partition(":")
    if not (first.isdigit() and (end.isdigit() if colon else True)):
        raise argparse.ArgumentTypeError(f"{text} is no range; give A:B, as 0:500")
    return range(int(first), int(end)) if colon else range(int(first))


if __name__ == "__main__":
    sys.exit(main())
