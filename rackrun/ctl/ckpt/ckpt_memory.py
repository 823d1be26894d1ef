"""``rackctl ckpt plan`` and ``clean``: memory that snapshots and their copies take, before a job and after it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from rackrun.checkpoint.arena.arena_format import PAYLOAD_BYTES_MAX
from rackrun.checkpoint.arena.memory_plan import MemoryPlan, ceilings
from rackrun.checkpoint.arena.orphans import SHARED_MEMORY, ArenaState, FoundArena, find_arenas, remove
from rackrun.checkpoint.redundancy.redundancy_presets import even_labels, redundancy_of
from rackrun.checkpoint.redundancy.shard_placement import Labels, Level, PlacementError, ShardPlacement, place
from rackrun.ctl.ckpt.ckpt_render import amount, print_json, say
from rackrun.errors import RackrunError, UsageError

__all__ = ["clean", "plan"]

_COMPARED = ("local", "mirror:tray", "xor:4@tray", "xor:8@tray", "rs:2+2@tray", "rs:8+2@tray", "mirror:rack")
_LEVELS: tuple[Level, ...] = ("process", "tray", "rack")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B?", re.ASCII)
_STATES = {ArenaState.ORPHANED: "red", ArenaState.CLOSED: "yellow", ArenaState.UNREADABLE: "magenta"}


@dataclass(frozen=True)
class _Planned:
    preset: str
    placement: ShardPlacement
    memory: MemoryPlan

    def survival(self, level: Level) -> tuple[int | None, float | None]:
        """Any so many domains may be lost; and which share of the losses of one more is survived."""
        any_of = self.placement.tolerance(level)
        share = None if any_of is None else self.placement.recoverable(level, any_of + 1)
        return any_of, None if share is None else float(share)


def plan(
    world_size: Annotated[int, typer.Option("--world-size", metavar="N", min=1, help="Number of ranks.")],
    bytes_per_rank: Annotated[
        str, typer.Option("--bytes-per-rank", metavar="SIZE", help="Size of the largest shard: 12GB, 800MiB, 1000000.")
    ],
    trays: Annotated[
        int, typer.Option("--trays", metavar="N", min=1, help="Number of trays; the ranks are spread evenly over them.")
    ],
    racks: Annotated[
        int, typer.Option("--racks", metavar="N", min=1, help="Number of racks; the trays are spread evenly over them.")
    ] = 1,
    replicas: Annotated[
        int, typer.Option("--replicas", metavar="N", min=1, help="Number of ranks that hold each shard (HSDP).")
    ] = 1,
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset",
            help="Redundancy: mirror:tray, mirror:3@rack, xor:8@tray, rs:8+2@tray or local. Default: compare several.",
            show_default=False,
        ),
    ] = None,
    here: Annotated[
        bool, typer.Option("--here", help="Check that a tray's share fits into this host's memory; exit code 1 if not.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare redundancies of snapshots. Which losses each survives, and how much memory it needs."""
    shard_bytes, labels = _bytes_in(bytes_per_rank), even_labels(world_size, trays, racks)
    shards = _replicas(world_size, replicas)
    wanted = _COMPARED if preset is None else (preset,)
    planned: list[_Planned] = []
    refused: dict[str, PlacementError] = {}
    for name in wanted:
        try:
            placement = place(labels, redundancy_of(name), shards)
        except PlacementError as error:
            if preset is not None:
                raise
            refused[name] = error
            continue
        planned.append(_Planned(name, placement, _memory(placement, shard_bytes, here=here)))
    short = here and not all(one.memory.fits for one in planned)
    if as_json:
        print_json({"plans": [_as_json(one) for one in planned], "refused": {n: e.what for n, e in refused.items()}})
    elif preset is not None:
        say(Console(markup=False, emoji=False), planned[0].placement.statement())
        say(Console(markup=False, emoji=False), planned[0].memory.table())
    else:
        _compare(Console(markup=False, emoji=False), planned, refused)
    if short:
        raise typer.Exit(1)


def clean(
    folder: Annotated[Path, typer.Option("--dir", metavar="DIR", help="The tmpfs with the arenas.")] = SHARED_MEMORY,
    yes: Annotated[bool, typer.Option("--yes", help="Remove the arenas. Without it they are only listed.")] = False,
    closed: Annotated[bool, typer.Option("--closed", help="Also remove arenas that their writer has closed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Remove arenas that dead jobs left. They lie in shared memory, and no process of theirs lives or has them open.

    Exit code 1: an arena could not be removed.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is no directory.", remedy="give the tmpfs where the arenas are.")
    going = {ArenaState.ORPHANED, *([ArenaState.CLOSED] if closed else [])}
    found = find_arenas(folder)
    failures: dict[Path, str] = {}
    removed: list[Path] = []
    for arena in found:
        if yes and arena.state in going:
            try:
                remove(arena)
                removed.append(arena.path)
            except RackrunError as error:
                failures[arena.path] = str(error)
    if as_json:
        print_json({"arenas": [_arena_as_json(one, removed, failures) for one in found], "dry_run": not yes})
    else:
        _tell_arenas(Console(markup=False, emoji=False), found, going, removed, failures, yes=yes)
    if failures:
        raise typer.Exit(1)


# -- plan
def _bytes_in(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is no size.", remedy="write it as 12GB, 800MiB or 1000000.")
    size = float(match[1]) * (1024 if match[3] else 1000) ** " kMGT".index(match[2] or " ")
    if size > PAYLOAD_BYTES_MAX:
        raise UsageError(f"a shard of {amount(size)} fits into no arena.", remedy="shard the state over more ranks.")
    return int(size)


def _replicas(world_size: int, replicas: int) -> Mapping[int, int] | None:
    """Return HSDP's layout of replicas: ranks r and r + world_size / replicas hold the same shard."""
    if replicas == 1:
        return None
    if world_size % replicas:
        raise UsageError(
            f"--world-size {world_size} is not divisible by --replicas {replicas}.",
            remedy="give a number of replicas that divides --world-size.",
        )
    return {rank: rank % (world_size // replicas) for rank in range(world_size)}


def _memory(placement: ShardPlacement, shard_bytes: int, *, here: bool) -> MemoryPlan:
    return MemoryPlan(
        local_ranks=_ranks_of_a_tray(placement.labels),
        shard_bytes=shard_bytes,
        redundancy=placement.redundancy,
        ceilings=ceilings(SHARED_MEMORY) if here else (),
        kept=placement.kept(),
    )


def _ranks_of_a_tray(labels: Mapping[int, Labels]) -> int:
    return max(Counter(label.tray for label in labels.values()).values())


def _as_json(one: _Planned) -> dict[str, Any]:
    survives = {level: dict(zip(("any", "share_of_one_more"), one.survival(level), strict=True)) for level in _LEVELS}
    return {
        "preset": one.preset,
        "redundancy": str(one.placement.redundancy),
        "survives": survives,
        "sets": one.placement.sets,
        "kept_shards": float(one.placement.kept()),
        "ranks_of_a_tray": one.memory.local_ranks,
        "own_bytes": one.memory.own_bytes,
        "kept_bytes": one.memory.kept_bytes,
        "needed_bytes": one.memory.needed_bytes,
        "fits": one.memory.fits if one.memory.ceilings else None,
    }


def _compare(console: Console, planned: list[_Planned], refused: Mapping[str, PlacementError]) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in ("ranks lost", "trays lost", "racks lost", "kept", "a tray"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in planned:
        losses = (_loss(*one.survival(level)) for level in _LEVELS)
        kept = f"+{float(one.placement.kept()):.1%}"
        short = "" if one.memory.fits else " (too much)"
        table.add_row(one.preset, *losses, kept, amount(one.memory.needed_bytes) + short)
    console.print(table, highlight=False)
    for name, error in refused.items():
        say(console, f"{name}: {error.what}")
    if planned:
        ranks = planned[0].memory.local_ranks
        say(console, "lost: any so many at once are survived, and the share of the losses of one more")
        say(
            console,
            f"kept: of others, in shards, on a rank; a tray: memory for {ranks} rank(s) with {planned[0].memory.slots} slots",
        )


def _loss(any_of: int | None, share: float | None) -> str:
    if any_of is None:
        return "?"
    return f"{any_of}" + (f", {share:.0%}" if share else "")


# -- clean
def _tell_arenas(
    console: Console,
    found: list[FoundArena],
    going: set[ArenaState],
    removed: list[Path],
    failures: Mapping[Path, str],
    *,
    yes: bool,
) -> None:
    for line, style in _arena_lines(found, removed, failures):
        say(console, line, style)
    orphans = [one for one in found if one.state in going]
    size = amount(sum(one.bytes for one in orphans))
    if yes:
        say(console, f"arenas of dead jobs: {len(orphans)}, {size}; removed: {len(removed)}")
    else:
        say(console, f"arenas of dead jobs: {len(orphans)}, {size}" + ("; --yes removes them" if orphans else ""))


def _arena_lines(
    found: list[FoundArena], removed: list[Path], failures: Mapping[Path, str]
) -> Iterator[tuple[str, str]]:
    for one in found:
        whose = f"job {one.job}, rank {one.rank}, " if one.job else ""
        outcome = (
            "; removed"
            if one.path in removed
            else f"; not removed: {failures[one.path]}"
            if one.path in failures
            else ""
        )
        yield f"{one.path}  {one.state}: {whose}{amount(one.bytes)}, {one.why}{outcome}", _STATES.get(one.state, "")


def _arena_as_json(one: FoundArena, removed: list[Path], failures: Mapping[Path, str]) -> dict[str, Any]:
    return {
        "path": str(one.path),
        "bytes": one.bytes,
        "state": one.state,
        "why": one.why,
        "job": one.job,
        "rank": one.rank,
        "epoch": one.fencing_token,
        "removed": one.path in removed,
        "failure": failures.get(one.path),
    }
