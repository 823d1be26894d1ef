"""Situations as words, for tables: ``8 ranks, 1 lost, 1 ready, step 0.1 s, checkpoint 60 s ago``.

========================== =========================================================================================
``N ranks``                of the world; 8 when it is not said
``N lost``                 the last ones; 0: a stall, or a connection that broke
``N ready``                spares; they take over when they are as many as are lost, unless ``out of reach``
``N starting``, ``N free`` workers on their way; slots where one can be started. Both count as coming
``N moved``                living ranks that would have to move too; ``N moving``: that have been taken out already
``N unfit``                slots whose GPU may become fit; ``N returning``: of lost trays whose agents are started again
``shrink to N``            ranks that can go on; ``exact``: with the same bits
``N usable``               slots; by default those of living ranks and of all named before
``rollback N``             steps; ``state lost``: nothing is left in memory
``checkpoint X s ago``     is on disk; ``begin again``: from step 0. Either allows a restart; ``at step N``; ``restarts N`` are left (3)
``waited X s``             since the break; ``held X s``: of them in a hold; ``patience X s``: for hardware; ``start patience X s``
``step|regroup|takeover|start|repair|acquire X s``, ``state X GB``, ``copy X GB/s``   are measured
``provider``               racks can be asked for; ``expects X s``: as it says; ``asked X s``: ago; ``came``: its workers can start; ``no quota``: it has refused
``planned``, ``user bug``, ``preemption``
========================== =========================================================================================
"""

from __future__ import annotations

import re

from rackrun.policy import ClusterView, Costs, Failure, FailureCause, ProviderNow, SpareNow
from rackrun.protocol.ids import Rank, SlotId

__all__ = ["situation"]

_PATTERNS = (
    r"(?P<value>\d+) (?P<name>ranks|lost|ready|starting|free|moved|moving|usable|unfit|returning)",
    r"(?P<name>checkpoint) (?P<value>\S+) s ago",
    r"(?P<name>shrink) to (?P<value>\d+)",
    r"(?P<name>state|copy) (?P<value>[\d.]+) GB(/s)?",
    r"(?P<name>start patience|waited|held|patience|step|regroup|takeover|start|repair|acquire|expects|asked) (?P<value>\S+) s",
    r"(?P<name>rollback|at step|restarts) (?P<value>\S+)",
    r"(?P<name>state lost|begin again|out of reach|exact|planned|user bug|preemption|provider|came|no quota)(?P<value>)",
)


def situation(words: str) -> tuple[Failure, ClusterView]:
    said: dict[str, float] = {}
    for word in filter(None, (part.strip() for part in words.split(","))):
        match = next((found for pattern in _PATTERNS if (found := re.fullmatch(pattern, word))), None)
        assert match is not None, f"{word!r} says nothing"
        said[match["name"]] = float(match["value"] or 1)
    return _failure(said), _view(said)


def _count(said: dict[str, float], name: str, default: int = 0) -> int:
    return int(said.get(name, default))


def _lost(said: dict[str, float]) -> list[Rank]:
    size = _count(said, "ranks", 8)
    return [Rank(rank) for rank in range(size - _count(said, "lost"), size)]


def _failure(said: dict[str, float]) -> Failure:
    whose = (
        FailureCause.USER
        if "user bug" in said
        else FailureCause.PREEMPTION
        if "preemption" in said
        else FailureCause.HARDWARE
    )
    lost = _lost(said)
    return Failure(
        what=f"{len(lost)} lost" if lost else "stalled",
        whose=whose,
        ranks=tuple(lost),
        slots=tuple(SlotId(f"tray-0/{rank}") for rank in lost),
        planned="planned" in said,
    )


def _view(said: dict[str, float]) -> ClusterView:
    size, lost = _count(said, "ranks", 8), _lost(said)
    ready, starting, free = (_count(said, name) for name in ("ready", "starting", "free"))
    reached = len(lost) <= ready and "out of reach" not in said and "state lost" not in said
    short = len(lost) - ready if ready < len(lost) else int("out of reach" in said)
    slots = [SlotId(f"tray-9/{index}") for index in range(ready)]
    return ClusterView(
        world_size=size,
        step=_count(said, "at step", 99),
        spares=tuple(SpareNow(slot=slot, state="ready") for slot in slots)
        + tuple(SpareNow(slot=SlotId(f"tray-8/{index}"), state="starting") for index in range(starting)),
        usable_slots=_count(said, "usable", size - len(lost) + ready + starting + free),
        takeovers=dict(zip(lost, slots, strict=False)) if lost and reached else {},
        uprooted={Rank(rank): SlotId(f"tray-7/{rank}") for rank in range(_count(said, "moved"))} if reached else {},
        moved=tuple(Rank(rank) for rank in range(_count(said, "moving"))),
        short=short,
        coming=starting + free,
        hoped=_count(said, "unfit") + _count(said, "returning"),
        returning_slots=_count(said, "returning"),
        why_short="no spare inside their NVLink clique" if "out of reach" in said else "",
        rollback_steps=None if "state lost" in said else _count(said, "rollback"),
        may_begin_again="begin again" in said or "checkpoint" in said,
        shrink_to=_count(said, "shrink"),
        exact="exact" in said,
        restarts_left=_count(said, "restarts", 3),
        waited_s=said.get("waited", 0.0),
        held_s=said.get("held", 0.0),
        start_patience_s=said.get("start patience", 600.0),
        repair_patience_s=said.get("patience", 0.0),
        provider=_provider(said),
        costs=Costs(
            step_s=said.get("step"),
            regroup_s=said.get("regroup"),
            takeover_s=said.get("takeover"),
            copy_bytes_per_s=said["copy"] * 1e9 if "copy" in said else None,
            state_bytes=said["state"] * 1e9 if "state" in said else None,
            start_s=said.get("start"),
            repair_s=said.get("repair"),
            acquire_s=said.get("acquire"),
            checkpoint_age_s=said.get("checkpoint"),
        ),
    )


def _provider(said: dict[str, float]) -> ProviderNow | None:
    if "provider" not in said:
        return None
    return ProviderNow(
        expected_s=said.get("expects"),
        asked_s=said.get("asked"),
        came="came" in said,
        why_not="no quota" if "no quota" in said else "",
    )
