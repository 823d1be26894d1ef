"""`rackrun.begin`: a run in the middle of a script ends with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.variants import in_stories

SCRIPT = """
import sys
import rackrun, torch
run = rackrun.begin(global_batch_size=4, micro_batch_size=2)
model = torch.nn.Linear(1, 1)
run.track(large=torch.nn.Linear(3000, 3000))  # large enough for a pool of threads
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer)
data = run.loader([torch.tensor([float(index)]) for index in range(8)])

@run.step
def train_step(step):
    for batch in data:
        step.backward(model(batch).mean())
    optimizer.step()
    optimizer.zero_grad()

def at_end():
    print("at the end")
    if sys.argv[1].endswith("error at the end"):
        raise RuntimeError("no disk")

run.at_end(at_end)
for step in run.steps(4):
    train_step(step)
    if sys.argv[1].startswith("break"):
        break
print("after the loop")
if sys.argv[1] == "twice":
    rackrun.begin(global_batch_size=4, micro_batch_size=2)
"""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("whole", ["at the end", "after the loop"]),
        ("break and error at the end", ["after the loop", "at the end"]),
        *in_stories(
            ("break", ["after the loop", "at the end"]),
            ("twice", ["at the end", "after the loop"]),
            ("error at the end", ["at the end"]),
            names=2,
        ),
    ],
)
def test_the_run_ends_with_the_script(what: str, said: list[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ran = subprocess.run(
        [sys.executable, str(script), what], capture_output=True, text=True, timeout=60, check=False, cwd=Path.cwd()
    )
    assert ran.stdout.splitlines() == said, ran.stderr
    assert (ran.returncode != 0) == (what == "twice" or "error" in what), ran.stderr
    assert ("called twice in one process" in ran.stderr) == (what == "twice"), ran.stderr
