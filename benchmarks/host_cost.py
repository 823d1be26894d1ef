"""What rackrun's own Python costs a step on the host: does it grow with the number of parameters?

    python benchmarks/host_cost.py                      counts, and processor time beside plain DDP (about 10 minutes on 2 cores)
    python benchmarks/host_cost.py --counts             counts alone (about 4 minutes)
    python benchmarks/host_cost.py --against /tmp/old   processor time of an older tree of this repository as well

A script is one process, on one thread, and a world of one: a model of many small layers in DistributedDataParallel, 2 x 2 weights and 2 biases each, so
that almost nothing is computed, and what is left is what hosts do. Plain DDP reads the same samples through torch's DataLoader, whose place
``run.loader`` takes.

**Counts**: calls of functions in rackrun's own files in one undisturbed committed step, from `sys.setprofile`, a generator's resumption counted as
a call. **Processor time**: every script waits for its turn, and then does a few steps; in each round every script has its turn, in an order that
changes, and the median of the rounds' ratios is reported. All scripts are started anew several times, because where a process happens to have its
memory makes a few hundredths. "reads" is plain DDP that reads what rackrun reads of a model and its optimizer in a step to
notice what would be lost when it is done again, and does nothing else: so much of the price is that of the promise. Optimizers use torch's foreach kernels, as they do by default on a GPU: with a loop of
Python's they would cost more, and rackrun seem to cost less.
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

HERE = Path(__file__).resolve().parents[1]
SIZES = (50, 300, 1000, 3000)
CASES = ("sgd", "adam", "norms", "scaler", "scheduler", "average")
STEPS, WARM = 8, 22
ROUNDS_A_START = 6
PROFILED = 18
"""A step that nothing is learned in: no power of two."""


class Layers(nn.Module):
    def __init__(self, parameters: int, norms: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(parameters // 2 - norms))
        self.norms = nn.ModuleList(nn.BatchNorm1d(2) for _ in range(norms))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, *self.norms):
            x = x + 0.01 * layer(x)
        return x


def optimizer_of(case: str, model: nn.Module) -> torch.optim.Optimizer:
    if case == "sgd":
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=True)
    return torch.optim.Adam(model.parameters(), lr=1e-3, foreach=True)


class Turns:
    """Does as many steps as the parent asks for, and tells of their seconds."""

    def __init__(self) -> None:
        self._wanted, self._seconds, self._began = WARM, list[float](), 0.0

    def begin(self) -> None:
        self._began = time.process_time()

    def end(self) -> None:
        self._seconds.append(time.process_time() - self._began)
        if len(self._seconds) == self._wanted:
            print(json.dumps(self._seconds), flush=True)
            line = sys.stdin.readline()
            if not line:
                os._exit(0)
            self._wanted, self._seconds = int(line), []


class Reads:
    """What a step under rackrun reads of a model and its optimizer to notice what would be lost when it is done again, and nothing else."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        from rackrun.worker.state.objects.module_structure import ModuleStructure
        from rackrun.worker.tensors.tensor_lists import versions

        self._all_versions = versions
        self._roots, self._optimizer = {"model": model}, optimizer
        self._structure = ModuleStructure(self._roots)
        self._versions = list[int]()

    def before_step(self) -> None:
        known = self._structure
        assert known.stands(self._roots)
        self._hold()
        self._compare()
        list(map(attrgetter("training"), known.modules))
        list(map(attrgetter("requires_grad"), known.parameters))
        list(map(attrgetter("grad"), known.parameters))

    def before_update(self) -> None:
        self._compare()

    def after_step(self) -> None:
        assert self._structure.seems_to_stand()
        self._hold()
        self._versions = self._all_versions(self._structure.parameters)

    def _compare(self) -> None:
        if self._versions != self._all_versions(self._structure.parameters):
            self._versions = []

    def _hold(self) -> None:
        set(map(type, gc.get_referents(*self._optimizer.state.values())))


def plain(case: str, parameters: int, *, reads: bool) -> None:
    """The same training without rackrun."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = nn.parallel.DistributedDataParallel(Layers(parameters, 0))
    optimizer, turns = optimizer_of(case, model), Turns()
    looks = Reads(model, optimizer) if reads else None
    samples: Any = [torch.randn(2) for _ in range(32)]
    data = torch.utils.data.DataLoader[Any](samples, batch_size=4, shuffle=True)
    while True:
        batches = iter(data)
        for _ in range(len(data)):
            turns.begin()
            if looks is not None:
                looks.before_step()
            samples = next(batches)
            (model(samples) - samples).pow(2).mean().backward()
            if looks is not None:
                looks.before_update()
            optimizer.step()
            optimizer.zero_grad()
            if looks is not None:
                looks.after_step()
            turns.end()


def elastic(case: str, parameters: int, *, counts: bool) -> None:
    import rackrun

    root = str(Path(rackrun.__file__).parent)
    called: collections.Counter[str] = collections.Counter()

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(root):
            called[f"{Path(frame.f_code.co_filename).name} {frame.f_code.co_name}"] += 1

    @rackrun.elastic(global_batch_size=4, micro_batch_size=4)
    def main(run: rackrun.Run) -> None:
        model = nn.parallel.DistributedDataParallel(Layers(parameters, 50 if case == "norms" else 0))
        optimizer = optimizer_of(case, model)
        run.track(model=model, optimizer=optimizer)
        scaler = torch.amp.GradScaler("cpu", enabled=case == "scaler")
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn())
        if case in ("scaler", "scheduler", "average"):
            run.track(**{case: {"scaler": scaler, "scheduler": scheduler, "average": average}[case]})
        data = run.loader([torch.randn(2) for _ in range(32)])

        @run.step
        def train_step(step: rackrun.Step) -> None:
            for samples in data:
                scaler.scale(step.scale((model(samples) - samples).pow(2).mean())).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if case == "scheduler":
                scheduler.step()
            elif case == "average":
                average.update_parameters(model)

        turns = Turns()
        for step in run.steps(10**6):
            if counts and int(step) == PROFILED:
                sys.setprofile(profile)
            turns.begin()
            train_step(step)
            if counts and int(step) == PROFILED:
                sys.setprofile(None)
                print(json.dumps({"calls": called.total(), "most": called.most_common(3)}), flush=True)
                os._exit(0)
            turns.end()

    main()


class Script:
    def __init__(self, tree: Path, *arguments: str) -> None:
        env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--worker", *arguments]
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(("[", "{")):
                return json.loads(line)
        raise SystemExit("a script has ended")

    def turn(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{STEPS}\n")
        self._process.stdin.flush()
        return float(statistics.median(self.answer()))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def counted(tree: Path, sizes: list[int]) -> dict[str, dict[int, int]]:
    found: dict[str, dict[int, int]] = {}
    for case in CASES:
        for size in sizes:
            script = Script(tree, "counts", case, str(size))
            found.setdefault(case, {})[size] = script.answer()["calls"]
            script.close()
        print(f"calls with {case}: {found[case]}", flush=True)
    return found


def compared(trees: dict[str, Path], parameters: int, starts: int) -> dict[str, Any]:
    kinds = {"plain": ("plain", HERE), "reads": ("reads", HERE)}
    kinds |= {name: ("elastic", tree) for name, tree in trees.items()}
    found: dict[str, Any] = {}
    for case in ("sgd", "adam"):
        turns: list[dict[str, float]] = []
        for start in range(starts):
            scripts = {name: Script(tree, kind, case, str(parameters)) for name, (kind, tree) in kinds.items()}
            for script in scripts.values():
                script.answer()
            for number in range(start, starts * ROUNDS_A_START, starts):
                order = random.Random(number).sample(sorted(scripts), len(scripts))
                turns.append({name: scripts[name].turn() for name in order})
            for script in scripts.values():
                script.close()
        over = [name for name in kinds if name != "plain"]
        ratios = {name: sorted(turn[name] / turn["plain"] for turn in turns) for name in over}
        found[case] = {
            "milliseconds": {name: round(statistics.median(turn[name] for turn in turns) * 1e3, 2) for name in kinds},
            "over plain": {name: round(statistics.median(ratios[name]), 4) for name in over},
            "quartiles": {
                name: [round(ratios[name][len(turns) // 4], 4), round(ratios[name][-(len(turns) // 4) - 1], 4)]
                for name in over
            },
        }
        print(f"{case}: {found[case]}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another tree of this repository")
    parser.add_argument("--counts", action="store_true", help="no processor time")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="of the models that are counted")
    parser.add_argument("--parameters", type=int, default=1000)
    parser.add_argument("--starts", type=int, default=8, help="how often all scripts are started anew")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        torch.set_num_threads(1)
        kind, case, size = args.worker
        if kind in ("plain", "reads"):
            plain(case, int(size), reads=kind == "reads")
        else:
            elastic(case, int(size), counts=kind == "counts")
        return
    from jobs import machine, save

    trees = {"rackrun": HERE, **({"old": args.against.resolve()} if args.against else {})}
    result: dict[str, Any] = {"machine": machine(), "parameters": args.parameters}
    result["calls of a step, by parameters"] = counted(HERE, args.sizes)
    if not args.counts:
        result["processor time of a step"] = compared(trees, args.parameters, args.starts)
        print(save("host_cost", result))


if __name__ == "__main__":
    main()
