"""How big a job is, and what it may lose, as far as its command says so: what a plan is held against before anything starts."""

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

__all__ = ["Layout", "layout_of", "rack_of"]


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    trays: int = 1
    slots: int
    """Of a tray."""
    spares: int = 0
    sharded: bool | None = None
    """Shards have no replica (FSDP2). None: nobody knows before the script runs."""
    checkpoints: bool = False
    copies: str = "mirror"
    """What other trays keep of snapshots."""
    starts_over: bool = False
    """When the last copy of some state is lost."""
    max_restarts: int = 3
    """Of the world, and of each tray's agent."""
    shrinks: bool = True
    rack: str = ""
    """A rack file that describes its trays, where agents are to ask a driver for GPUs."""

    @property
    def ranks(self) -> int:
        return self.trays * self.slots - self.spares

    def options(self) -> list[str]:
        """As ``rackrun`` is given them."""
        words = ["--rack", self.rack] if self.rack else ["--nproc-per-node", str(self.slots)]
        words += ["--spares", str(self.spares)]
        words += ["--trays", str(self.trays)] if self.trays > 1 and not self.rack else []
        words += ["--checkpoint-dir", "{out}/checkpoints", "--checkpoint-every", "3"] if self.checkpoints else []
        words += ["--snapshot-copies", self.copies] if self.copies != "mirror" else []
        words += ["--max-restarts", str(self.max_restarts)] if self.max_restarts != 3 else []
        return words + ([] if self.shrinks else ["--min-ranks", "0"])


def rack_of(command: Sequence[str]) -> Topology | None:
    """That the command names; None: none, or it cannot be read."""
    file = option(command, "--rack")
    if not file:
        return None
    try:
        return read_rack_file(Path(file).expanduser())
    except (OSError, UsageError):
        return None  # who starts the job says so, with the line


def _on_rack(file: str, spares: int) -> Layout | None:
    rack = rack_of(["--rack", file])
    sizes = {len(tray.gpus) for _, tray in rack.trays.values()} if rack is not None else set()
    if rack is None or len(sizes) != 1:
        return None
    return Layout(trays=len(rack.trays), slots=sizes.pop(), spares=spares, rack=file)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise PlanError(f"{message}.", remedy="see rackrun --help.")


def layout_of(command: Sequence[str], *, on_rack: bool = False) -> Layout | None:
    """Of rackrun's options, a script and its arguments. None: they do not say how big it is (several hosts, ``auto``) or what it survives (a rack file, a policy
    of its own), so nothing can be judged before it runs. ``on_rack``: only how big it is, also where a rack file whose trays are alike says it."""
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
    return Layout(
        trays=given.trays,
        slots=int(given.nproc_per_node),
        spares=given.spares,
        checkpoints=bool(given.checkpoint_dir),
        copies=given.snapshot_copies,
        starts_over=(given.lost_state or ("restart" if given.checkpoint_dir else "stop")) == "restart",
        max_restarts=given.max_restarts,
        shrinks=given.min_ranks > 0,
    )
