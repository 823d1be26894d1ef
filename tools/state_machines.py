"""Write docs/state_machines.md from the transition tables of the code: ``python tools/state_machines.py [--check]``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from enum import Enum, StrEnum
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rackrun.agent.tray import process_states  # noqa: E402
from rackrun.core.faults import stall_window  # noqa: E402
from rackrun.core.generation import world, world_pause  # noqa: E402
from rackrun.core.members import workers  # noqa: E402
from rackrun.core.requests import pending_requests  # noqa: E402
from rackrun.core.resize import rented_rack  # noqa: E402
from rackrun.worker.membership.decisions import membership_states  # noqa: E402

PAGE = ROOT / "docs" / "state_machines.md"
LEGEND = {
    "job": """Forming: trays join. Setup: members start and run to their first step; a plain script stays in this
phase. Training: all ranks train. Parking: the generation is broken, survivors report, and the next plan is not
decided yet. Resuming: the next plan was sent, and ranks restore their state. Restarting: all workers are ended,
and the world begins again. Ending: all ranks have returned from `main`.""",
    "worker": """Starting: it runs up to its first step. Ready: a spare, or a member before training. Breaking: it
was told that its generation is broken. Parked: it has reported what it holds. Resuming: the next plan was sent
to it. Released: the job is done, and the worker may exit. If a rank is lost while others resume, the generation
is broken again: resuming leads to breaking.""",
    "pause": """None: no pause is in progress; there is none outside the training phase. Pausing: all ranks were told
to pause after the same step. Paused: all ranks have paused, so the change that follows repeats no step. Overdue:
the time limit has expired (`expire`), and the change is made although some ranks have not paused. `end`: the
training phase ends, because of that change or of a loss.""",
    "request": """A request to drain, swap, shrink or grow, or the departure of a tray. Asked: it is checked. Begun: it is carried
out at a step boundary. Empty (only a drain): no rank is left in its slots; spares there are ended, and other
trays take over the copies. `interrupt`: not all ranks train; the drain is checked again when they do. In a
hold, a drain of slots without a rank goes from begun to done. Done and refused: the last answer was given. A
refusal after `begin` means that the request was called off.""",
    "window": """The window gathers reports of ranks without progress in one generation. Empty: no rank reports.
Gathering: the first report has come, and the first wait runs. Gathered: the first wait is over; from now on the
reports of all members are enough for a judgement. Due: the second wait is over too (`expire`), or a comparison
with the times of other ranks shows that some ranks hang (`compare`); the reports so far are enough. Deadlock:
all ranks wait for each other (`lock`), so the reports so far are enough. `clear`: the last report was withdrawn.
If only one rank reports, and it reports again, the first wait begins again: due leads to gathered.""",
    "rack": """Asked: the provider has the request. Delivered: the provider says that it is there. Joined: its trays have
joined. Serving: one of its workers is ready. Leaving: its ranks leave it, and it is given back.""",
    "process": """Waiting: the slot's former process is not gone yet. Starting (after `cleared`): the agent looks for
what the process needs. Forking (after `found`): the agent has asked the fork server for the process. Running
(after `born`): the process exists. Fencing: the agent kills it. Ending: its exit was reported to the
coordinator, and it is not reaped yet. Gone (after `reap`): the kernel has reaped it. `fail`: there will be no
process.""",
    "membership": """Waiting: it is in no generation, and none is announced. Called: a plan has come, and nothing of
this worker was broken before, as on a spare. Whole: it is in the newest generation that it knows. Failed: a
collective has failed, and no break is announced. Broken: a break is announced, and the worker has reported what
it holds. Planned: the plan has come. No gate passes in failed, broken and planned. `leave`: a newcomer leaves
`main` before it has joined a generation. `reenter`: it leaves `main` for a world of another size. `start`: it
trains without a coordinator.""",
    "unit": """Open: its gate is not entered, or the unit is to be done again. Entered: the sums or a plan will say whether it
counts. Counted: it cannot be undone. `refuse`: all ranks conclude from the sums that it is to be done again. `count`,
`discard`: a plan says so. `place`: the committed position is set, for a newcomer or after a rollback.""",
}
PLAIN = """A hold has no state of its own: all ranks hold while the phase is parking and the latest decision is to
hold. A request to stop, a question to a policy function, and a condemned worker that is not killed yet each either
exist or do not."""
HEAD = """# State machines

Each state machine has a transition table in the code. These diagrams are drawn from the tables by
`python tools/state_machines.py`; a test holds them. A transition that is not in a table raises `InvalidTransition`,
with the latest states that led there.
"""


def _diagram(arrows: Iterable[tuple[str, str, str]], first: str, last: Iterable[str]) -> str:
    lines = [f"    [*] --> {first}"]
    lines += [f"    {before} --> {after}{f': {label}' if label else ''}" for before, after, label in arrows]
    lines += [f"    {state} --> [*]" for state in last]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"])


State = TypeVar("State", bound=Enum)
Trigger = TypeVar("Trigger", bound=StrEnum)


def _plain(table: Mapping[State, tuple[State, ...]]) -> list[tuple[str, str, str]]:
    return [(now.value, after.value, "") for now, follow in table.items() for after in follow if after is not now]


def _triggered(table: Mapping[State, Mapping[Trigger, State]]) -> list[tuple[str, str, str]]:
    """Return the arrows of a table with triggers, without those that lead back to their own state."""
    return [
        (now.value, after.value, trigger.value)
        for now, follow in table.items()
        for trigger, after in follow.items()
        if after is not now
    ]


def page() -> str:
    """Return the whole page."""
    phases, stages = _plain(world.PHASES), _plain(rented_rack.STAGES)
    triggers = [
        (now.value, after.value, trigger.value)
        for now, follow in workers.TRANSITIONS.items()
        for trigger, after in follow.items()
    ]
    processes = _triggered(process_states.PROCESS_TRANSITIONS)
    memberships = _triggered(membership_states.MEMBERSHIP_TRANSITIONS)
    units = _triggered(membership_states.UNIT_TRANSITIONS)
    windows = _triggered(stall_window.WINDOW_TRANSITIONS)
    every = [arrow for arrow in triggers if arrow[2] not in ("fence", "exit")]
    parts = [
        HEAD,
        "## The job",
        "`PHASES` in `rackrun.core.generation.world`. From each phase the job may also be stopped.",
        LEGEND["job"],
        _diagram([arrow for arrow in phases if arrow[1] != "stopped"], "forming", ["ending"]),
        "## A pause of all ranks",
        "`PAUSE_TRANSITIONS` in `rackrun.core.generation.world_pause`.",
        LEGEND["pause"],
        _diagram(_triggered(world_pause.PAUSE_TRANSITIONS), "none", []),
        "## A worker, as the core sees it",
        (
            "`TRANSITIONS` in `rackrun.core.members.workers`. In addition `fence` leads from every living state to fenced, "
            "and\n`exit` from every state to exited."
        ),
        LEGEND["worker"],
        _diagram(every, "starting", ["released"]),
        "## A request of an operator",
        "`REQUEST_TRANSITIONS` in `rackrun.core.requests.pending_requests`.",
        LEGEND["request"],
        _diagram(_triggered(pending_requests.REQUEST_TRANSITIONS), "asked", ["done", "refused"]),
        "## A window of stalls",
        (
            "`WINDOW_TRANSITIONS` in `rackrun.core.faults.stall_window`. In addition `compare` leads from every state to due,\n"
            "`lock` to deadlock, and `clear` to empty."
        ),
        LEGEND["window"],
        _diagram([arrow for arrow in windows if arrow[2] not in ("compare", "lock", "clear")], "empty", []),
        "## A rack from a provider",
        "`STAGES` in `rackrun.core.resize.rented_rack`. From each stage the rack may also be released.",
        LEGEND["rack"],
        _diagram(stages, "asked", ["leaving"]),
        "## A worker's process, as its agent sees it",
        "`PROCESS_TRANSITIONS` in `rackrun.agent.tray.process_states`.",
        LEGEND["process"],
        _diagram(processes, "waiting", ["gone"]),
        "## A worker, as it sees itself",
        "`MEMBERSHIP_TRANSITIONS` in `rackrun.worker.membership.decisions.membership_states`.",
        LEGEND["membership"],
        _diagram(memberships, "waiting", []),
        "## A unit, as a worker sees it",
        "`UNIT_TRANSITIONS` in `rackrun.worker.membership.decisions.membership_states`.",
        LEGEND["unit"],
        _diagram(units, "open", []),
        "## Without a table",
        PLAIN,
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(0 if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page() else f"{PAGE} is not up to date")
    PAGE.write_text(page(), encoding="utf-8")
