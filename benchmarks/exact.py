"""What ``reduction="exact"`` costs, beside plain DDP and beside ``"fast"``, in one run on one machine.

    python benchmarks/exact.py            25.2 M fp32 parameters, 4 ranks (about 12 minutes on 2 cores)
    python benchmarks/exact.py --quick    a small model: does it still work
    python benchmarks/exact.py --kernels  the arithmetic alone, in one process: what a rank pays for each micro-batch

Step times and CPU seconds (of all processes) come from short blocks that alternate while the other jobs are stopped, as in
recovery.py. One micro-batch a rank: a gradient is rounded once and read once in a step. The losses of an exact run do not
depend on the number of ranks; tests/worker/exact/test_exact.py shows that.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from jobs import TORCHRUN_ENV, Job, bootstrap_median, machine, rackrun_command, save, torchrun_command
from recovery import FULL, QUICK, RANKS, Workload, overhead_blocks

SYSTEMS = ("torchrun", "fast", "exact", "exact64")
MEASURES = {
    "step_s": "step time (median in a block)",
    "mean_step_s": "step time (mean in a block)",
    "cpu_s_per_step": "CPU seconds a step",
}


class Reductions(Workload):
    def job(self, system: str, steps: int, *, checkpoint: bool) -> Job:
        arguments = ("--steps", str(steps), *self.size)
        if system == "torchrun":
            return Job(torchrun_command("ddp_mlp.py", *arguments, ranks=RANKS, checkpoint=checkpoint), env=TORCHRUN_ENV)
        return Job(
            rackrun_command("elastic_mlp.py", *arguments, ranks=RANKS, spares=0), env={"BENCH_REDUCTION": system}
        )


def kernels(count: int = 25_165_824, repeats: int = 15) -> dict[str, float]:
    """CPU milliseconds of one thread for ``count`` fp32 elements, the median."""
    from rackrun.worker.exact.fixed_point import fixed_point

    torch.set_num_threads(1)
    values, sums = torch.randn(count), torch.empty(count, dtype=torch.int32)
    compiled, plain = fixed_point(torch.device("cpu")), fixed_point(torch.device("cpu"))
    plain._kernel = None  # type: ignore[attr-defined]
    work: dict[str, Any] = {"copy of as many bytes": lambda: sums.view(torch.float32).copy_(values)}
    for name, arithmetic in (("compiled", compiled), ("torch", plain)):
        work[f"{name}: round"] = lambda use=arithmetic: use.add(values, 2.0**20, sums, fresh=True)
        work[f"{name}: round and add"] = lambda use=arithmetic: use.add(values, 2.0**20, sums, fresh=False)
        work[f"{name}: read"] = lambda use=arithmetic: use.read(sums, 2.0**-20, values)
    taken: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeats):
        for name, run in work.items():
            began = time.process_time()
            run()
            taken[name].append(time.process_time() - began)
    return {name: round(1000 * statistics.median(times), 2) for name, times in taken.items()}


def summary(pairs: list[dict[str, dict[str, float]]], systems: list[str]) -> str:
    lines = ["| | against | median of ratios | 95 % interval | blocks |", "|---|---|---|---|---|"]
    for system in systems[1:]:
        for base in systems[: 2 if system.startswith("exact") else 1]:
            for key, name in MEASURES.items():
                ratios = [pair[system][key] / pair[base][key] for pair in pairs]
                low, high = bootstrap_median(ratios)
                lines.append(
                    f"| {system}, {name} | {base} | {statistics.median(ratios):.3f} | {low:.3f} to {high:.3f} | {len(ratios)} |"
                )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model, one block of each")
    parser.add_argument("--kernels", action="store_true", help="the arithmetic alone")
    parser.add_argument("--pairs", type=int, default=24, help="blocks of each")
    parser.add_argument(
        "--systems", default=";".join(SYSTEMS[:3]), help=f"of {'; '.join(SYSTEMS)}, the first being the base"
    )
    args = parser.parse_args()
    if args.kernels:
        for name, taken_ms in kernels().items():
            print(f"{name:30} {taken_ms:8.2f} ms")
        return
    of = QUICK if args.quick else FULL
    workload = Reductions(of.size, of.start_timeout_s, of.step_timeout_s)
    systems = args.systems.split(";")
    result: dict[str, Any] = {"machine": machine(), "quick": args.quick, "kernels_cpu_ms": kernels()}
    result["blocks"] = overhead_blocks(workload, systems, 1 if args.quick else args.pairs)
    result["table"] = summary(result["blocks"], systems)
    path = save("exact-quick" if args.quick else "exact", result)
    print(f"{result['table']}\n\n{result['kernels_cpu_ms']}\n{result['machine']}\n{path}")


if __name__ == "__main__":
    main()
