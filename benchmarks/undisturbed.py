"""The undisturbed step of this tree beside that of an older one: is it slower than it was?

    git worktree add /tmp/old COMMIT
    python benchmarks/undisturbed.py --against /tmp/old            25.2 M fp32 parameters, 4 ranks and a spare (about 6 minutes on 2 cores)
    python benchmarks/undisturbed.py --against /tmp/old --quick    a small model, where what a step costs beside its arithmetic shows most

The workload is that of ``recovery.py``. Blocks of steps alternate, while the other job is stopped; the median of the blocks' ratios is reported.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exact import summary
from jobs import ROOT, Job, machine, rackrun_command, save
from recovery import FULL, QUICK, RANKS, Workload, overhead_blocks


@dataclass(frozen=True)
class Trees(Workload):
    """A system is the path of a tree."""

    def job(self, system: str, steps: int, *, checkpoint: bool) -> Job:  # noqa: ARG002
        command = rackrun_command("elastic_mlp.py", "--steps", str(steps), *self.size, ranks=RANKS, spares=1)
        return Job(command, env={"PYTHONPATH": system}, folder=Path(system))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, required=True, help="another tree of this repository")
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument("--pairs", type=int, default=16, help="blocks of each")
    args = parser.parse_args()
    of = QUICK if args.quick else FULL
    trees = [str(args.against.resolve()), str(ROOT)]
    workload = Trees(of.size, of.start_timeout_s, of.step_timeout_s)
    names = dict(zip(trees, ("old", "new"), strict=True))
    blocks = [
        {names[tree]: taken for tree, taken in pair.items()} for pair in overhead_blocks(workload, trees, args.pairs)
    ]
    result: dict[str, Any] = {"machine": machine(), "quick": args.quick, "blocks": blocks}
    result["table"] = summary(blocks, ["old", "new"])
    path = save("undisturbed-quick" if args.quick else "undisturbed", result)
    print(f"{result['table']}\n{result['machine']}\n{path}")


if __name__ == "__main__":
    main()
