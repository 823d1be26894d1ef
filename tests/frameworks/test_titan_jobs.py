"""torchtitan under rackrun trains what it trains alone under torchrun, to the bit, whoever is lost at which moment."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.frameworks.framework_jobs import FrameworkJobs, same
from tests.frameworks.titan_assets import make_assets

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.timeout(400)]

SCRIPT = Path(__file__).parent / "scripts" / "train_titan.py"
SHARDED: dict[str, Any] = {}
ALL: dict[str, Any] = {"accumulate": 2, "save": 3, "validate": 2, "steps": 5}


@pytest.fixture
def jobs(tmp_path: Path, run_rackrun: Callable[..., Any]) -> Callable[..., FrameworkJobs]:
    """Returns a function that makes jobs, given a number of ranks if that is not 2."""
    make_assets(tmp_path / "assets")
    return partial(FrameworkJobs, SCRIPT, tmp_path, run_rackrun)


@pytest.fixture
def compare(jobs: Callable[..., FrameworkJobs]) -> Callable[..., None]:
    """Returns a function that compares torchtitan alone with a job of rackrun's in which one is struck."""

    def compared(arguments: dict[str, Any], kill: str) -> None:
        both = jobs(2 * arguments.get("tp", 1) * arguments.get("replicate", 1))
        same(both.stock(arguments), both.elastic(arguments, kill))

    return compared


@pytest.mark.feature("torchtitan", "FSDP2, any rank lost, rank 0 too")
def test_rank_0_is_killed_in_the_backward_pass(jobs: Callable[..., FrameworkJobs], tmp_path: Path) -> None:
    both, values = jobs(), tmp_path / "values.jsonl"
    stock = both.stock(ALL)
    same(stock, both.elastic(ALL, "3:0:KILL:backward", options=["--log-to", f"jsonl:{values}"]))
    lines = [json.loads(line) for line in values.read_text().splitlines()]
    logged = {name.strip(): one for name, one in stock["0"]["told"].items()}
    assert [line["step"] for line in lines if "loss" in line] == [0, 1, 2, 3, 4]
    assert [line["step"] for line in lines if "validation_loss" in line] == [0, 1, 3]
    for line in lines:
        told = logged[f"{line['step'] + 1}" if "loss" in line else f"{line['step'] + 1} validation"]
        assert line.get("loss", line.get("validation_loss")) in told.values()


@pytest.mark.feature("torchtitan", "gradient accumulation, validation")
@pytest.mark.stories
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("signalled", ["KILL", "STOP"])
@pytest.mark.parametrize(
    "moment",
    [
        "1:forward",
        "3:forward",
        "4:backward",
        "3:clip",
        "4:applied",
        "3:between",
        "3:saving",
        "3:saved",
        "2:validating",
        "5:end",
    ],
)
def test_one_is_lost_at_another_moment(moment: str, signalled: str, rank: int, compare: Callable[..., None]) -> None:
    step, where = moment.split(":")
    compare(ALL, f"{step}:{rank}:{signalled}:{where}")


@pytest.mark.stories
def test_another_rank_is_lost_when_the_step_is_done_again(jobs: Callable[..., FrameworkJobs], tmp_path: Path) -> None:
    both, two_spares = jobs(), ["--nproc-per-node", 4, "--spares", 2]
    found = both.elastic(ALL, "4:0:KILL:backward,4:1:KILL:clip", options=two_spares)
    assert list(tmp_path.glob("*/struck-1"))
    same(both.stock(ALL), found)


@pytest.mark.feature("torchtitan", "HSDP")
@pytest.mark.stories
@pytest.mark.parametrize("kill", ["3:0:KILL:backward", "4:3:STOP:clip"])
def test_a_rank_of_hsdp_comes_from_its_replica(kill: str, compare: Callable[..., None]) -> None:
    compare({"replicate": 2, "validate": 2}, kill)


@pytest.mark.feature("torchtitan", "tensor parallelism with FSDP2")
@pytest.mark.stories
@pytest.mark.parametrize("kill", ["3:1:KILL:backward", "4:2:STOP:clip"])
def test_a_tensor_parallel_rank_is_lost(kill: str, compare: Callable[..., None]) -> None:
    compare({"tp": 2}, kill)


@pytest.mark.feature("torchtitan", "two optimizers in one OptimizersContainer")
@pytest.mark.stories
@pytest.mark.parametrize("kill", ["", "3:0:KILL:applied"])
def test_two_optimizers(kill: str, compare: Callable[..., None]) -> None:
    compare({"optimizers": 2, "log": 2, "bits": 32}, kill)


@pytest.mark.feature("torchtitan", "a script that is not changed (--framework titan)")
@pytest.mark.stories
def test_a_script_unchanged(jobs: Callable[..., FrameworkJobs], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", _with_scripts())
    both, options = jobs(), ["--framework", "titan", "--preload", "titan_on_cpu"]
    same(both.stock(ALL), both.elastic(ALL, "3:0:KILL:forward", kind="unchanged", options=options))


@pytest.mark.feature("torchtitan", "its own command, -m torchtitan.train (--framework titan)")
@pytest.mark.stories
def test_the_command_of_torchtitan(tmp_path: Path, run_rackrun: Callable[..., Any]) -> None:
    assets = make_assets(tmp_path / "assets")
    settings = {
        "hf_assets_path": assets / "tokenizer",
        "dump_folder": tmp_path / "out",
        "dataloader.dataset_path": assets / "texts",
        "training.local_batch_size": 2,
        "training.seq_len": 32,
        "training.steps": 5,
        "parallelism.spmd_backend": "partial_dtensor",
    }
    given = ["--module", "titan_tiny", "--config", "tiny", "--training.disable_cuda_graphs"]
    given += [str(one) for name, value in settings.items() for one in (f"--{name}", value)]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": _with_scripts()}
    logged: list[Any] = []
    for struck in ("", str(tmp_path / "struck")):
        values = tmp_path / f"values{len(logged)}.jsonl"
        options = ["--framework", "titan", "--preload", "titan_on_cpu", "--log-to", f"jsonl:{values}"]
        command = ["--standalone", "--nproc-per-node", 3, "--spares", 1, *options, "-m", "torchtitan.train", *given]
        ran = run_rackrun(command, timeout=150.0, env={**environment, "STRUCK": struck})
        assert ran.exit_code == 0, ran
        logged.append([{**json.loads(line), "time": 0} for line in values.read_text().splitlines()])
    assert (tmp_path / "struck").exists()
    assert [line["step"] for line in logged[0]] == [0, 1, 2, 3, 4]
    assert logged[0] == logged[1]


@pytest.mark.feature("torchtitan", "a job that goes on from --checkpoint-dir")
@pytest.mark.stories
def test_a_job_goes_on_from_rackrun_s_checkpoint(jobs: Callable[..., FrameworkJobs], tmp_path: Path) -> None:
    both, kept = jobs(), ["--checkpoint-dir", tmp_path / "kept", "--checkpoint-every", 2]
    whole = both.stock(ALL)
    both.elastic({**ALL, "save": 0, "steps": 3}, "2:1:KILL:backward", options=kept)
    resumed = both.elastic(ALL, "4:0:KILL:validating", options=kept)
    for rank, expected in whole.items():
        told = resumed[rank]["told"]
        assert {"4 ", "5 "} <= told.keys() < expected["told"].keys()
        expected["told"] = {name: expected["told"][name] for name in told}
    same(whole, resumed)


@pytest.mark.feature("torchtitan", "a job that is asked to end (SIGTERM) and goes on later")
@pytest.mark.stories
def test_a_job_that_was_drained_goes_on(
    jobs: Callable[..., FrameworkJobs], tmp_path: Path, run_rackrun: Callable[..., Any]
) -> None:
    both, kept = jobs(), ["--checkpoint-dir", tmp_path / "kept"]
    arguments = {**ALL, "steps": 8}
    whole = both.stock(arguments)
    folder = tmp_path / "drained"
    folder.mkdir()
    given = [SCRIPT, folder, "elastic", "2:0:END:forward", json.dumps(arguments)]
    ran = run_rackrun(["--standalone", "--nproc-per-node", 2, *kept, *given], timeout=150.0)
    assert ran.exit_code == 143, ran
    assert not list(folder.glob("[0-9].json")), "half a training was taken for a whole one"
    found = both.elastic(arguments, options=kept)
    for rank, expected in whole.items():
        told = found[rank]["told"]
        assert {"8 "} <= told.keys() < expected["told"].keys()
        expected["told"] = {name: expected["told"][name] for name in told}
    same(whole, found)


@pytest.mark.feature("torchtitan", "its own checkpoints, read by it and by rackrun")
@pytest.mark.stories
@pytest.mark.parametrize("order", ["elastic stock", "stock elastic", "elastic elastic"])
def test_a_job_goes_on_from_torchtitan_s_checkpoint(
    order: str, jobs: Callable[..., FrameworkJobs], tmp_path: Path
) -> None:
    both, arguments = jobs(), {"accumulate": 2, "save": 2, "set": {"dump_folder": str(tmp_path / "kept")}}
    first, second = order.split()
    whole = both.stock({**arguments, "save": 0})
    getattr(both, first)({**arguments, "steps": 4}, *(["3:1:KILL:backward"] if first == "elastic" else []))
    found = getattr(both, second)(arguments, *(["5:0:KILL:forward"] if second == "elastic" else []))
    for rank, expected in whole.items():
        assert list(found[rank]["told"]) == ["5 ", "6 "]
        expected["told"] = {name: expected["told"][name] for name in ("5 ", "6 ")}
    same(whole, found)


@pytest.mark.feature("torchtitan", "TensorBoard, from whoever is rank 0")
@pytest.mark.stories
def test_tensorboard_has_every_step(jobs: Callable[..., FrameworkJobs], tmp_path: Path) -> None:
    arguments = {"tensorboard": True}
    both = jobs()
    same(both.stock(arguments), both.elastic(arguments, "3:0:KILL:between"))
    stock, elastic = (_logged(tmp_path / f"job-{number}" / "out" / "tb") for number in range(2))
    assert stock == elastic
    assert sorted(stock) == [1, 2, 3, 4, 5, 6]


def _with_scripts() -> str:
    return os.pathsep.join([str(SCRIPT.parent), os.environ.get("PYTHONPATH", "")])


def _logged(folder: Path) -> dict[int, set[float]]:
    """Return step -> the losses that the files of TensorBoard below ``folder`` have for it."""
    found: dict[int, set[float]] = {}
    for path in folder.rglob("events.*"):
        events = EventAccumulator(str(path)).Reload()
        for event in events.Scalars("loss_metrics/global_avg_loss") if events.Tags()["scalars"] else ():
            found.setdefault(event.step, set()).add(event.value)
    return found
