"""Play seeds of the simulator to one core, and the same events to the core of another tree: are the commands the same?

    python tools/core_parity.py record --seeds 0:1000 | PYTHONPATH=/path/to/old/tree python tools/core_parity.py replay

``record`` writes one JSON line for each job's configuration and for each event with its commands. ``replay`` compares.
The commands of one event count as equal in any order. With ``--costs`` the figures of decisions count too; without it
a decision counts by its rung, its targets and who made it, and sentences for people do not count.
Texts of remedies never do. Exit code 1: some differ.
The other tree may be older than typed timers (2026-11-26): a timer is compared by its text. A job is not
compared any further from where that tree cannot read it: a newer rung in its configuration, a newer event.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any, TextIO

import msgspec

from rackrun.core.machine.control_plane import ControlPlane
from rackrun.protocol import events
from rackrun.protocol.job_config import JobConfig

SHOWN = 10


def _plain(message: Any) -> dict[str, Any]:
    """Return a message as JSON has it, with a timer as its text."""
    found: dict[str, Any] = json.loads(msgspec.json.encode(message))
    if "timer" in found:
        del found["timer"]
        found["name"] = str(message.timer)
    return found


def _comparable(command: dict[str, Any], *, costs: bool) -> str:
    command = {key: value for key, value in command.items() if key not in ("remedy", "of_hold")}
    kind = command["command"]
    if kind == "Decided" and not costs:
        decision = command["decision"]
        command = {"command": kind, **{name: decision[name] for name in ("rung", "targets", "by")}}
    elif kind == "AskPolicy" and not costs:
        command = {"command": kind, "question": command["question"]}
    elif kind in ("Notice", "BreakGeneration", "ResumeGeneration", "StopJob", "Answer") and not costs:
        command = {key: value for key, value in command.items() if key not in ("text", "because", "protected")}
    return json.dumps(command, sort_keys=True)


class _Recorder(ControlPlane):
    """A core that writes what it hears and answers."""

    def __init__(self, config: JobConfig) -> None:
        super().__init__(config)
        print(json.dumps({"config": json.loads(msgspec.json.encode(config))}))

    def handle(self, event: events.Event) -> Any:
        commands = super().handle(event)
        print(json.dumps({"event": _plain(event), "commands": [_plain(command) for command in commands]}))
        return commands


def record(seeds: range) -> None:
    """Write all events and commands of these seeds to standard output."""
    from rackrun.chaos.simulator.fuzzing.fuzz import play

    for seed in seeds:
        play(seed, _Recorder)


def _event(raw: dict[str, Any]) -> events.Event:
    """Return an event of the core of this tree. JSON has no NaN: null stands for it where no null may be."""
    if "name" in raw and raw["event"] == "TimerFired" and hasattr(events, "Timer"):
        from rackrun.protocol.timers import timer_named

        raw = {key: value for key, value in raw.items() if key != "name"} | {
            "timer": msgspec.to_builtins(timer_named(raw["name"]))
        }
    kinds: Any = events.Event
    try:
        event: events.Event = msgspec.json.decode(json.dumps(raw), type=kinds)
    except msgspec.ValidationError:
        event = msgspec.convert(_with_nan(raw), kinds, builtin_types=(bytes,))
    return event


def _with_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_nan(inner) for key, inner in value.items()}
    return [math.nan if inner is None else _with_nan(inner) for inner in value] if isinstance(value, list) else value


def replay(lines: TextIO, *, costs: bool) -> int:
    """Play recorded events to the core of this tree. Returns the exit code."""
    core: ControlPlane | None = None
    jobs = heard = 0
    differing: dict[int, str] = {}
    unknown: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for line in lines:
        row = json.loads(line)
        if "config" in row:
            jobs += 1
            try:
                core = ControlPlane(msgspec.convert(row["config"], JobConfig))
            except msgspec.ValidationError as error:
                core = None
                unknown[f"configuration: {error}"] += 1
            continue
        if core is None or jobs in differing:
            continue
        try:
            event = _event(row["event"])
        except msgspec.ValidationError:
            core = None
            unknown[f"event {row['event']['event']}"] += 1
            continue
        heard += 1
        here = Counter(_comparable(_plain(one), costs=costs) for one in core.handle(event))
        there = Counter(_comparable(one, costs=costs) for one in row["commands"])
        if here != there:
            kinds[_kinds(row["event"], there - here, here - there)] += 1
            differing[jobs] = (
                f"{json.dumps(row['event'])[:300]}\n  only recorded: {_some(there - here)}\n  only here: {_some(here - there)}"
            )
    for job, what in [*differing.items()][:SHOWN]:
        print(f"job {job}: {what}")
    for kind, count in kinds.most_common():
        print(f"{count} jobs differ first at {kind}")
    for why, count in unknown.items():
        print(f"{count} jobs are not compared from where this tree cannot read them: {why}")
    print(f"{jobs} jobs, {heard} events, {len(differing)} jobs differ")
    return 1 if differing else 0


def _kinds(event: dict[str, Any], there: Counter[str], here: Counter[str]) -> str:
    """Return the kinds of an event and of the commands in which the trees differ."""
    name = f"{event['event']} {event.get('name', '').partition(':')[0]}".strip()
    only = (", ".join(sorted({json.loads(one)["command"] for one in some})) or "nothing" for some in (there, here))
    return "{}: recorded {}, here {}".format(name, *only)


def _some(commands: Counter[str]) -> str:
    return "; ".join(one[:300] for one in [*commands][:3]) or "nothing"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    recording = parts.add_parser("record")
    recording.add_argument("--seeds", default="0:1000", metavar="A:B")
    parts.add_parser("replay").add_argument("--costs", action="store_true")
    args = parser.parse_args(argv)
    if args.part == "replay":
        return replay(sys.stdin, costs=args.costs)
    first, _, end = args.seeds.partition(":")
    record(range(int(first), int(end)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
