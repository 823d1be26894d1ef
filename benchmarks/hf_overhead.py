"""What rackrun's Trainer costs beside transformers' own: the step time of both, in blocks that alternate.

    python benchmarks/hf_overhead.py [--blocks 12] [--json FILE]

Two jobs of two ranks train the same GPT-2 on CPUs, one with torchrun and transformers' Trainer, one with rackrun and `rackrun.hf.Trainer`. They
take turns of a few steps, in an order that changes; whoever has no turn sleeps. Reported: the median over the blocks of the ratio of the two step
times (time on the clock of rank 0), and of the processor times of both ranks.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS, WARM, RANKS = 6, 66, 2
KINDS = ("stock", "elastic")
HERE = Path(__file__).resolve().parents[1]


def work(kind: str, folder: Path, blocks: int, layers: int) -> None:
    """One rank of a job: it trains a block when the file ``turn-KIND-NUMBER`` is there, and writes what it took."""
    import torch

    trainers = importlib.import_module("rackrun.hf" if kind == "elastic" else "transformers")
    import transformers
    from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()

    class Turns(TrainerCallback):  # type: ignore[misc]
        began = (0.0, 0.0)

        def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            block, step = divmod(state.global_step - WARM, STEPS)
            if step == 0 and state.global_step >= WARM:
                while not (folder / f"turn-{kind}-{block}").exists():
                    time.sleep(0.005)
                self.began = time.perf_counter(), time.process_time()

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            block, step = divmod(state.global_step - WARM, STEPS)
            if step == 0 and block > 0:
                took = time.perf_counter() - self.began[0], time.process_time() - self.began[1]
                part = folder / f"part-{kind}-{block - 1}-{os.environ['RANK']}"
                part.write_text(json.dumps([seconds / STEPS for seconds in took]))
                part.rename(folder / f"done-{kind}-{block - 1}-{os.environ['RANK']}")

    data = [{"input_ids": (ids := torch.randint(0, 1000, (64,))), "labels": ids} for _ in range(512)]
    arguments = TrainingArguments(
        output_dir=str(folder / "unused"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=WARM + blocks * STEPS,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    config = GPT2Config(
        vocab_size=1000, n_positions=64, n_embd=256, n_layer=layers, n_head=4, bos_token_id=0, eos_token_id=0
    )
    trainer = trainers.Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=data, callbacks=[Turns()])
    trainer.train()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work[0], Path(args.work[1]), args.blocks, args.layers)
        return 0
    found = measured(args.blocks, args.layers)
    print(json.dumps(found, indent=2))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


def measured(blocks: int, layers: int) -> dict[str, Any]:
    """Run both jobs, and return the ratios and their parts."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"}
    launchers = {
        "stock": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)],
        "elastic": ["-m", "rackrun", "--standalone", "--nproc-per-node", str(RANKS)],
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = [__file__, "--blocks", str(blocks), "--layers", str(layers), "--work"]
        jobs: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for kind in KINDS:
                command = [sys.executable, *launchers[kind], *script, kind, name]
                jobs[kind] = subprocess.Popen(command, env=environment, cwd=name, stdout=subprocess.DEVNULL)
            times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
            for block in range(blocks):
                for kind in random.sample(KINDS, len(KINDS)):
                    (folder / f"turn-{kind}-{block}").touch()
                    times[kind].append(_taken(folder, jobs[kind], kind, block))
            for job in jobs.values():
                job.wait(timeout=60)
        finally:
            for job in jobs.values():
                job.terminate()
                job.wait()
    ratios = [[e[i] / s[i] for s, e in zip(times["stock"], times["elastic"], strict=True)] for i in (0, 1)]
    return {
        "step_time_ratio": round(statistics.median(ratios[0]), 4),
        "step_time_ratio_quartiles": [round(one, 4) for one in statistics.quantiles(ratios[0], n=4)[::2]],
        "processor_time_ratio": round(statistics.median(ratios[1]), 4),
        "processor_time_ratio_quartiles": [round(one, 4) for one in statistics.quantiles(ratios[1], n=4)[::2]],
        "stock_step_s": round(statistics.median(wall for wall, _ in times["stock"]), 4),
        "elastic_step_s": round(statistics.median(wall for wall, _ in times["elastic"]), 4),
        "blocks": blocks,
        "steps_per_block": STEPS,
        "layers": layers,
        "ranks": RANKS,
    }


def _taken(folder: Path, job: subprocess.Popen[bytes], kind: str, block: int) -> tuple[float, float]:
    """Wait for a block, and return the step time of rank 0 and the processor time of a step on both ranks."""
    paths = [folder / f"done-{kind}-{block}-{rank}" for rank in range(RANKS)]
    while not all(path.exists() for path in paths):
        if job.poll() is not None:
            raise RuntimeError(f"the {kind} job has ended with exit code {job.returncode}")
        time.sleep(0.02)
    rows = [json.loads(path.read_text()) for path in paths]
    return rows[0][0], sum(row[1] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
