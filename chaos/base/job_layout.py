"""Derive from a job's command how large the job is and what it may lose, before anything starts.

A plan is judged against this layout.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rackrun.chaos.base.errors import PlanError
from rackrun.chaos.base.job_command import option, options_of
from rackrun.errors import UsageError
from rackrun.topology.model.rack_file import read_rack_file
from rackrun.topology.model.racks import Topology

__all__ = ["JobLayout", "layout_of", "rack_of"]


class JobLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The size of a job, and what it may lose."""

    trays: int = 1
    slots: int
    """Slots per tray."""
    spares: int = 0
    sharded: bool | None = None
    """Whether state is sharded without replicas (FSDP2); None if that is unknown before the script runs."""
    checkpoints: bool = False
    copies: str = "mirror"
    """The value of ``--snapshot-copies``: what other trays keep of snapshots."""
    starts_over: bool = False
    """Whether the job starts again from the beginning when the last copy of some state is lost."""
    max_restarts: int = 3
    """The most restarts of the world, and of each tray's agent."""
    shrinks: bool = True
    rack: str = ""
    """A rack file that describes the trays, for jobs whose agents ask a driver for GPUs; "" for none."""

    @property
    def ranks(self) -> int:
        return self.trays * self.slots - self.spares

    def options(self) -> list[str]:
        """Return the options of ``rackrun`` that give a job this layout."""
        words = ["--rack", self.rack] if self.rack else ["--nproc-per-node", str(self.slots)]
        words += ["--spares", str(self.spares)]
        words += ["--trays", str(self.trays)] if self.trays > 1 and not self.rack else []
        words += ["--checkpoint-dir", "{out}/checkpoints", "--checkpoint-every", "3"] if self.checkpoints else []
        words += ["--snapshot-copies", self.copies] if self.copies != "mirror" else []
        words += ["--max-restarts", str(self.max_restarts)] if self.max_restarts != 3 else []
        return words + ([] if self.shrinks else ["--min-ranks", "0"])


def rack_of(command: Sequence[str]) -> Topology | None:
    """Return the rack that the command names, or None if it names none or the file cannot be read."""
    file = option(command, "--rack")
    if not file:
        return None
    try:
        return read_rack_file(Path(file).expanduser())
    except (OSError, UsageError):
        return None  # the launcher reports the error, with its line


def _on_rack(file: str, spares: int) -> JobLayout | None:
    rack = rack_of(["--rack", file])
    sizes = {len(tray.gpus) for _, tray in rack.trays.values()} if rack is not None else set()
    if rack is None or len(sizes) != 1:
        return None
    return JobLayout(trays=len(rack.trays), slots=sizes.pop(), spares=spares, rack=file)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise PlanError(f"{message}.", remedy="see rackrun --help.")


def layout_of(command: Sequence[str], *, on_rack: bool = False) -> JobLayout | None:
    """Derive the layout from rackrun's options, a script and its arguments.

    Returns None if the options do not say how large the job is (several hosts, ``auto``) or what it survives (a rack
    file, a policy of its own); nothing can then be judged before the run. With ``on_rack`` only the size counts, and a
    rack file whose trays are all alike gives it.
    """
    options = options_of(command)
    parser = _Parser(add_help=False, allow_abbrev=False)
    add = parser.add_argument
    add("--nproc-per-node", "--nproc_per_node", default="1")
    add("--nnodes", default="1")
    add("--rack")
    add("--policy")
    add("--spares", type=int, default=0)
    add("--trays", type=int, default=1)
    add("--checkpoint-dir", "--checkpoint_dir")
    add("--lost-state", "--lost_state")
    add("--snapshot-copies", "--snapshot_copies", default="mirror")
    add("--max-restarts", "--max_restarts", type=int, default=3)
    add("--min-ranks", "--min_ranks", type=int, default=1)
    given, _ = parser.parse_known_args(options)
    if given.rack and on_rack:
        return _on_rack(given.rack, given.spares)
    if given.rack or given.policy or given.nnodes not in ("1", "1:1") or not given.nproc_per_node.isdigit():
        return None
    return JobLayout(
        trays=given.trays,
        slots=int(given.nproc_per_node),
        spares=given.spares,
        checkpoints=bool(given.checkpoint_dir),
        copies=given.snapshot_copies,
        starts_over=(given.lost_state or ("restart" if given.checkpoint_dir else "stop")) == "restart",
        max_restarts=given.max_restarts,
        shrinks=given.min_ranks > 0,
    )
