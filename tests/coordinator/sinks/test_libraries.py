"""TensorBoard, W&B and MLflow, with their own libraries: what they show has each step once, also after a resume."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rackrun.coordinator.sinks.sink import Record, Rewind, line_of
from rackrun.coordinator.sinks.sink_messages import FINISH, Closed, Note, Said
from tests.coordinator.sinks.openings import opening, record

pytestmark = pytest.mark.slow
CHILD = "rackrun.coordinator.sinks.sink_child"


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


def deliver(
    kind: str,
    target: object,
    directory: Path,
    items: Sequence[Record | Rewind],
    *,
    run_id: str = "job-1",
    first: int = 0,
) -> list[Said]:
    """Run the process of a sink over ``items``; a training that begins at step 0 is a new one."""
    made = opening(kind, target, directory, fresh=first == 0, first_step=first, run_id=run_id)
    read, write = os.pipe()
    lines = b"\n".join([*(line_of(seq, item) for seq, item in enumerate(items, 1)), FINISH, b""])
    command = [sys.executable, "-m", CHILD, str(write), msgspec.json.encode(made).decode()]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    ended = subprocess.run(command, input=lines, pass_fds=[write], env=environment, timeout=100)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        said = [msgspec.json.decode(line, type=Said) for line in file]
    assert ended.returncode == 0, said
    assert isinstance(said[-1], Closed)
    return said


def python(code: str, *arguments: object) -> Any:
    """Run code that prints JSON in an interpreter of its own, because these libraries leave threads behind."""
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)], capture_output=True)
    assert ran.returncode == 0, ran.stderr.decode()
    return json.loads(ran.stdout.splitlines()[-1])


TENSORBOARD = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0, "tensors": 0})
events.Reload()
tags = events.Tags()
scalars = {tag: [[one.step, one.value] for one in events.Scalars(tag)] for tag in tags["scalars"]}
texts = {tag: [[one.step, one.tensor_proto.string_val[0].decode()] for one in events.Tensors(tag)] for tag in tags["tensors"]}
print(json.dumps(scalars | texts))
"""


def steps(shown: list[Any]) -> list[int]:
    return [step for step, _ in shown]


@needs("tensorboard")
def test_tensorboard_shows_numbers_and_texts(tmp_path: Path) -> None:
    deliver("tensorboard", tmp_path / "tb", tmp_path, [record(0, loss=0.5, note="warm up"), record(1, loss=0.25)])
    assert python(TENSORBOARD, tmp_path / "tb") == {"loss": [[0, 0.5], [1, 0.25]], "note": [[0, "warm up"]]}


@needs("tensorboard")
@pytest.mark.parametrize("same_out_dir", [True, False])
def test_tensorboard_shows_a_resumed_training_as_one(same_out_dir: bool, tmp_path: Path) -> None:
    deliver("tensorboard", tmp_path / "tb", tmp_path / "a", [record(step) for step in range(8)])
    again = tmp_path / ("a" if same_out_dir else "b")
    deliver("tensorboard", tmp_path / "tb", again, [record(step) for step in range(5, 12)], first=5, run_id="job-2")
    assert steps(python(TENSORBOARD, tmp_path / "tb")["loss"]) == list(range(12))


@needs("tensorboard")
def test_tensorboard_shows_another_training_as_another_run(tmp_path: Path) -> None:
    for run_id in ("job-1", "job-2"):
        deliver("tensorboard", tmp_path / "tb", tmp_path, [record(0), record(1)], run_id=run_id)
    for shown in (tmp_path / "tb", tmp_path / "tb" / "earlier-1"):
        assert steps(python(TENSORBOARD, shown)["loss"]) == [0, 1]


@needs("tensorboard")
def test_tensorboard_forgets_values_that_were_wrong(tmp_path: Path) -> None:
    items: list[Record | Rewind] = [
        record(0),
        record(1),
        record(2),
        Rewind(0),
        record(1, loss=7.0),
        record(2, loss=8.0),
    ]
    deliver("tensorboard", tmp_path / "tb", tmp_path, items)
    assert python(TENSORBOARD, tmp_path / "tb")["loss"] == [[0, 1.0], [1, 7.0], [2, 8.0]]


def wandb_records(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format, after a header of 7 bytes."""
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # all of a record, or its end
            yield whole
            whole = b""


WANDB = """
import json, sys
from wandb.proto.wandb_internal_pb2 import Record
rows = []
for text in json.load(sys.stdin):
    record = Record.FromString(bytes.fromhex(text))
    if record.WhichOneof("record_type") == "history":
        values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        rows.append([record.history.step.num, values["loss"]])
print(json.dumps(rows))
"""


def wandb_rows(directory: Path) -> list[Any]:
    files = sorted(directory.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_ctime)
    texts = json.dumps([one.hex() for path in files for one in wandb_records(path)])
    ran = subprocess.run([sys.executable, "-c", WANDB], input=texts.encode(), capture_output=True, check=True)
    rows: list[Any] = json.loads(ran.stdout)
    return rows


@needs("wandb")
def test_wandb_has_one_offline_run_that_a_resumed_job_goes_on_with(tmp_path: Path) -> None:
    said = deliver("wandb", "project", tmp_path, [record(step) for step in range(4)])
    assert any(isinstance(one, Note) and "wandb sync" in one.text for one in said)
    deliver("wandb", "project", tmp_path, [record(step) for step in range(2, 6)], first=2, run_id="job-2")
    assert steps(wandb_rows(tmp_path)) == list(range(6))
    runs = {path.name for path in tmp_path.glob("wandb/offline-run-*/*.wandb")}
    assert runs == {"run-job-1.wandb"}


MLFLOW = """
import json, sys
from mlflow.tracking import MlflowClient
client = MlflowClient(sys.argv[1])
runs = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
histories = {run.info.run_name: client.get_metric_history(run.info.run_id, "loss") for run in runs}
shown = {name: [[one.step, one.value] for one in found] for name, found in histories.items()}
print(json.dumps([shown, [[run.info.status, run.data.tags.get("note")] for run in runs]]))
"""


@needs("mlflow")
@pytest.mark.timeout(300)
def test_mlflow_has_one_run_that_a_resumed_job_goes_on_with(tmp_path: Path) -> None:
    if find_spec("alembic") is None:
        pytest.skip("mlflow is there without its databases")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    deliver("mlflow", f"{uri}#mine", tmp_path, [record(step, loss=1.0, note="a b") for step in range(4)])
    deliver("mlflow", f"{uri}#mine", tmp_path, [record(step) for step in range(2, 6)], first=2, run_id="job-2")
    shown, ends = python(MLFLOW, uri)
    assert {name: steps(found) for name, found in shown.items()} == {"job-1": list(range(6))}
    assert ends == [["FINISHED", "a b"]]
