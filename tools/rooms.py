"""Where things live: docs/rooms.md, from the first line of every module.

python tools/rooms.py            writes docs/rooms.md
python tools/rooms.py --check    exit code 1 if it is out of date
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import sys
import textwrap
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "rooms.md"
PACKAGES = (
    "protocol",
    "pages",
    "core",
    "topology",
    "checkpoint",
    "link",
    "coordinator",
    "agent",
    "worker",
    "frameworks",
    "launch",
    "ctl",
    "chaos",
)
INTRODUCTION = """# Where things live

Made by `python tools/rooms.py` from the first line of every module; a test holds it. Packages stand in the order in
which they may import: each from those above it, and `coordinator`, `agent` and `worker` not from each other.
`tests/test_layers.py` has the order, and that of the rooms in each package.

| if you look for | begin with |
|---|---|
| what a step does in a worker | `rackrun.worker.loop.unit_attempt`, then `rackrun.worker.loop.unit_runner` |
| the gate, and what is committed | `rackrun.worker.membership.decisions.gate`, `rackrun.worker.membership.decisions.membership_machine`, `rackrun.core.generation.restore_plan` |
| what happens after a loss | `rackrun.core.recovery.recovery`, `rackrun.worker.loop.join_generation` |
| who takes a lost rank | `rackrun.core.policy.choice`, `rackrun.core.placement.seating` |
| how an exit is noticed | `rackrun.agent.workers.worker_handle`, `rackrun.agent.tray.tray` (`check_end`) |
| how a hang is noticed | `rackrun.agent.tray.worker_liveness`, `rackrun.agent.workers.hang_detector` |
| a pause of all ranks: who begins it, and how a rank learns of it | `rackrun.core.requests.planned_swap`, `rackrun.core.generation.world_pause` (its states), `rackrun.worker.membership.decisions.membership_machine` (`ask_pause`), `rackrun.worker.loop.pause` |
| how a GPU is watched and judged | `rackrun.agent.gpus.gpu_monitor`, `rackrun.topology.health.tray_health` |
| slow ranks | `rackrun.core.stragglers.straggler_detection` |
| how replicas are compared, and which rank is blamed | `rackrun.worker.integrity.silent_corruption`, `rackrun.core.faults.divergence`, `rackrun.core.faults.corruption` |
| an operator's request and its answer | `rackrun.core.requests.operator_requests`, `rackrun.core.requests.resize_requests`, `rackrun.core.requests.replies` |
| which state a rank has, and how it is copied | `rackrun.worker.state.tracked_state`, `rackrun.worker.snapshots.shard_snapshots` |
| what is on disk, and when | the table in [what a run writes](operate.md#what-a-run-writes) |
| checkpoints on disk | `rackrun.worker.snapshots.durable_checkpoints`, `rackrun.checkpoint.durable.durable_store` |
| what an event does, and who acts on it | `rackrun.core.machine.apply`, `rackrun.core.machine.rules` |
| every message | `rackrun.protocol.events`, `rackrun.protocol.commands` |
| what is stale, and where it is ignored | `rackrun.core.machine.apply` (events), `rackrun.worker.membership.decisions.membership_machine` (plans, breaks), `rackrun.agent.snapshots.snapshot_service` (snapshots), `rackrun.coordinator.journal.committed_units` (units) |
| options of the launcher | `rackrun.launch.options.arguments` |
| a fault of the chaos suite | `rackrun.chaos.faults.table.fault_table`, `rackrun.chaos.injectors` |
| what proves that nothing was lost | `rackrun.chaos.oracles`, and [which test holds which promise](proofs.md) |
"""


def page() -> str:
    found = [INTRODUCTION]
    for package in PACKAGES:
        rooms: dict[Path, list[Path]] = defaultdict(list)
        for folder, _, names in os.walk(ROOT / "rackrun" / package, followlinks=True):
            rooms[Path(folder)] += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
        top = ROOT / "rackrun" / package
        found.append(f"\n## rackrun.{package}\n\n{_wrapped(_first_line(top / '__init__.py'))}\n")
        for room in sorted(room for room, modules in rooms.items() if modules):
            modules = [path for path in rooms[room] if path.name not in ("__init__.py", "__main__.py")]
            if room != top:
                found.append(
                    f"\n### {'.'.join(room.relative_to(ROOT).parts)}\n\n{_wrapped(_first_line(room / '__init__.py'))}\n"
                )
            found += (
                ["\n", *(f"{_wrapped(f'- `{path.stem}`: {_first_line(path)}', '  ')}\n" for path in modules)]
                if modules
                else []
            )
    return "".join(found)


def _first_line(path: Path) -> str:
    """Of its docstring; the whole first paragraph, in one line."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split())


def _wrapped(text: str, indent: str = "") -> str:
    """Lines of at most 120 characters; code in backticks stays on one line."""
    whole = re.sub(r"`[^`]+`", lambda code: code[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(whole, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    if parser.parse_args().check:
        sys.exit(0 if PAGE.read_text(encoding="utf-8") == page() else f"{PAGE} is out of date: python tools/rooms.py")
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
