"""The parts of Lightning's adapter that need no job."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, Timer, WeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler
from torchmetrics import MeanSquaredError, MinMaxMetric

from rackrun.errors import UsageError
from rackrun.frameworks.lightning import refusals
from rackrun.frameworks.lightning.base.data_order import LightningOrder
from rackrun.frameworks.lightning.base.package import BOTH
from rackrun.frameworks.lightning.base.plain_text import TENSOR_BYTES_MAX, decoded, encoded
from rackrun.frameworks.lightning.forward_redirection import RestoringRedirection
from rackrun.frameworks.lightning.state import csv_rows, loop_state
from rackrun.frameworks.lightning.state.checkpoint_files import CheckpointFiles
from rackrun.frameworks.lightning.state.logged_results import captured_metrics, restore_metrics
from rackrun.frameworks.lightning.state.loop_state import LoopRecord
from rackrun.frameworks.rank_texts import of_rank
from rackrun.worker.membership.decisions.interruptions import Abandoned

pytestmark = pytest.mark.frameworks

STRATEGIES = """
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from rackrun.errors import UsageError
from rackrun.frameworks.lightning import script_unchanged
from rackrun.frameworks.lightning.base.package import BOTH

assert type(script_unchanged.elastic(BOTH[0], "auto")).__name__ == "ElasticStrategy"
given = script_unchanged.elastic(BOTH[0], DDPStrategy(find_unused_parameters=True))
assert given._ddp_kwargs == {"find_unused_parameters": True}
assert script_unchanged.elastic(BOTH[0], given) is given
made = Trainer(accelerator="cpu", strategy=given, logger=False)
assert (made.global_rank, made.world_size, made.is_global_zero) == (0, 1, True)
try:
    script_unchanged.elastic(BOTH[0], "fsdp")
except UsageError as error:
    print("refused", str(error).partition("strategy=")[2].split(".")[0])
"""

RANKS, MICRO_BATCH = 2, 2
CPU = torch.device("cpu")


def loader(samples: int, rank: int, *, drop_last: bool = False) -> Any:
    """What Lightning makes of a shuffling loader on ``rank``."""
    sampler: Any = DistributedSampler(range(samples), RANKS, rank, seed=3)  # type: ignore[arg-type]
    return DataLoader(range(samples), batch_size=MICRO_BATCH, sampler=sampler, drop_last=drop_last)  # type: ignore[arg-type]


# -- data
@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("limit", [None, 2])
@pytest.mark.parametrize(
    ("samples", "drop_last"), [(8, False), (21, False), (24, False), (3, False), (8, True), (21, True), (24, True)]
)
def test_every_step_has_the_samples_of_the_stock_loop(
    samples: int, drop_last: bool, limit: int | None, accumulation: int
) -> None:
    batches = min(len(loader(samples, 0, drop_last=drop_last)), limit or samples)
    order = LightningOrder(loader(samples, 0, drop_last=drop_last), RANKS, batches, accumulation, 0)
    step = used = 0
    for epoch in range(3):
        of_rank = []
        for rank in range(RANKS):
            stock = loader(samples, rank, drop_last=drop_last)
            stock.sampler.set_epoch(epoch)
            of_rank.append(list(stock.batch_sampler)[:batches])
        for first in range(0, batches, accumulation):
            expected = [batch for one in of_rank for batch in one[first : first + accumulation]]
            assert order.shards(step) == len(expected)
            assert [order.ids(step, shard).tolist() for shard in range(len(expected))] == expected
            assert (order.place(step), order.samples_before(step)) == ((epoch, first), used)
            used += sum(len(batch) for batch in expected)
            step += 1
    assert step == 3 * order.steps_per_epoch


def test_one_rank_has_the_order_of_its_own_generator() -> None:
    def made() -> Any:
        return DataLoader(range(7), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(5))  # type: ignore[arg-type]

    order, stock = LightningOrder(made(), 1, 4, 1, 0), made()
    for epoch in range(3):
        expected = list(stock.batch_sampler)
        assert [order.ids(4 * epoch + number, 0).tolist() for number in range(4)] == expected


def test_an_order_draws_nothing_from_the_global_generator() -> None:
    order = LightningOrder(DataLoader(range(7), batch_size=2, shuffle=True), 1, 4, 1, 0)  # type: ignore[arg-type]
    before = torch.get_rng_state()
    again = [order.ids(0, 0).tolist(), order.ids(4, 0).tolist(), order.ids(0, 0).tolist()]
    assert again[0] == again[2]
    assert torch.equal(torch.get_rng_state(), before)


# -- the loops' state
@pytest.mark.parametrize(
    "value",
    [
        None,
        [1, 0.1, "a", True, float("inf")],
        {"a": (1, 2), 3: {"tensor:": 1}},
        Path("a"),
        np.float32(0.5),
        {"b": torch.tensor([[0.1, float("-inf")]], dtype=torch.bfloat16), "c": torch.tensor(3)},
        torch.zeros(0, 2),
    ],
)
def test_a_value_is_the_same_after_its_way_to_another_process(value: Any) -> None:
    found = decoded(encoded(value, "it"), CPU)
    if isinstance(value, torch.Tensor):
        assert torch.equal(found, value)
        assert found.shape == value.shape
    elif isinstance(value, dict) and "b" in value:
        assert all(torch.equal(found[name], value[name]) and found[name].dtype == value[name].dtype for name in value)
    else:
        assert found == value


@pytest.mark.parametrize("value", [{1, 2}, object(), torch.zeros(TENSOR_BYTES_MAX // 4 + 1)])
def test_what_another_process_could_not_be_given_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match="Mine keeps a"):
        encoded([value], "Mine")


def test_a_record_is_the_same_after_its_way_to_another_process() -> None:
    record = LoopRecord()
    record.step_done(4, ["same", "same"], "calls", ["zero", "one"], "after")
    record.phase_done(["left", "other"], "logged")
    other = LoopRecord()
    other.load_state_dict(record.state_dict())
    assert vars(other) == vars(record)
    assert [of_rank(other.turn, 1), of_rank(other.outcome, 1), of_rank(other.phases[0][0], 1)] == [
        "same",
        "one",
        "other",
    ]


# -- files
def rows(logger: CSVLogger) -> list[dict[str, str]]:
    with Path(logger.log_dir, "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_successor_goes_on_after_the_rows_that_count(tmp_path: Path) -> None:
    first = CSVLogger(tmp_path, version=0)
    csv_rows.replace_atomically(first)
    for step in range(3):
        first.log_metrics({"loss": step / 3, **({"later": 1.0} if step == 2 else {})}, step)
        first.save()
    second = CSVLogger(tmp_path, version=0)
    csv_rows.continue_rows(second, 2)
    second.log_metrics({"loss": 0.5, "other": 1.0}, 2)
    second.save()
    assert [(one["loss"], one["step"], one["other"]) for one in rows(second)] == [
        ("0.0", "0", ""),
        (str(1 / 3), "1", ""),
        ("0.5", "2", "1.0"),
    ]
    assert sorted(path.name for path in Path(second.log_dir).iterdir()) == ["metrics.csv"]


def test_a_job_that_is_resumed_finds_the_rows_that_a_new_logger_deletes(tmp_path: Path) -> None:
    first = CSVLogger(tmp_path, version=0)
    for step in range(2):
        first.log_metrics({"loss": float(step)}, step)
        first.save()
    resumed = CSVLogger(tmp_path, version=0)
    csv_rows.back_up_rows(resumed)
    csv_rows.continue_rows(resumed, 2)
    assert [one["loss"] for one in rows(resumed)] == ["0.0", "1.0"]
    anew = CSVLogger(tmp_path, version=0)
    csv_rows.back_up_rows(anew)
    csv_rows.delete_backup(anew)
    assert not list(Path(anew.log_dir).iterdir())


def test_a_call_that_is_left_before_it_comes_to_the_module_leaves_nothing_in_it() -> None:
    class Module(torch.nn.Module):
        def forward(self, x: int) -> int:
            return x

        def validation_step(self, x: int) -> int:
            return 10 * int(self(x))

    class Wrapper(torch.nn.Module):
        lost = True

        def __init__(self, inner: Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: int) -> int:
            if self.lost:
                raise Abandoned
            return int(self.inner(x))

    module = Module()
    wrapper = Wrapper(module)
    call = RestoringRedirection(_ForwardRedirection())
    with pytest.raises(Abandoned):
        call(wrapper, module, "validation_step", 2)
    wrapper.lost = False
    assert call(wrapper, module, "validation_step", 2) == 20
    assert module(3) == 3


def test_a_successor_that_is_lost_while_it_begins_loses_no_row(tmp_path: Path) -> None:
    first = CSVLogger(tmp_path, version=0)
    first.log_metrics({"loss": 1.0}, 0)
    first.save()
    path = Path(first.log_dir, "metrics.csv")
    path.rename(f"{path}.before")
    second = CSVLogger(tmp_path, version=0)
    csv_rows.continue_rows(second, 1)
    assert [one["loss"] for one in rows(second)] == ["1.0"]


def test_a_clock_that_runs_goes_on_and_one_that_has_not_begun_takes_the_time_of_the_lost_one() -> None:
    package = BOTH[0]
    lost, waits, runs = (Timer("00:01:00:00") for _ in range(3))
    lost._start_time[RunningStage.TRAINING] = lost._end_time[RunningStage.TRAINING] = 0.0
    lost._offset = 30
    runs._start_time[RunningStage.TRAINING] = 0.0
    state = loop_state._of_callback(lost, package)
    for one in (waits, runs):
        loop_state.restore_callbacks([one], [state], CPU, package)
    assert (waits.time_elapsed(), runs._offset) == (30.0, 0)


def test_a_minimum_over_time_is_among_the_values_of_a_metric() -> None:
    mine, other = ([MinMaxMetric(MeanSquaredError())] for _ in range(2))
    for value in (3.0, 1.0, 2.0):
        mine[0](torch.tensor([value]), torch.tensor([0.0]))
    restore_metrics(torch.nn.ModuleList(other), captured_metrics(torch.nn.ModuleList(mine)))
    for module in (mine, other):
        module[0](torch.tensor([2.0]), torch.tensor([0.0]))
    assert other[0].compute() == mine[0].compute()


def test_a_callback_is_given_its_state_only_where_that_differs() -> None:
    class Counts(Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.seen = self.loads = 0

        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.seen}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seen, self.loads = state["seen"], self.loads + 1

    mine = Counts()
    entered = loop_state._of_callback(mine, BOTH[0])
    for change in (0, 1):
        mine.seen += change
        loop_state.restore_callbacks([mine], [entered], CPU, BOTH[0])
    assert (mine.seen, mine.loads) == (0, 1)


def test_a_file_of_a_save_that_is_done_again_is_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "of_the_first_attempt.ckpt").touch()
    files = CheckpointFiles(SimpleNamespace(callbacks=[]), SimpleNamespace)
    assert not files._exists(tmp_path / "of_the_first_attempt.ckpt", None)
    files.save(tmp_path / "a.ckpt")
    assert files._exists(f"{tmp_path}/./a.ckpt", None)
    files.remove(str(tmp_path / "a.ckpt"))
    assert not files._exists(tmp_path / "a.ckpt", None)


# -- refusals
def test_this_version_of_lightning_is_known() -> None:
    for package in BOTH:
        if package.is_installed:
            refusals.refuse_version(package)


@pytest.mark.feature("Lightning", "a version with another loop", how="refused")
def test_another_loop_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_TrainingEpochLoop, "advance", lambda self: None)
    with pytest.raises(UsageError, match=r"_TrainingEpochLoop\.advance is \(self\)"):
        refusals.refuse_version(BOTH[0])


def trainer(**changed: Any) -> Any:
    values = {
        "lightning_module": SimpleNamespace(automatic_optimization=True),
        "callbacks": [],
        "reload_dataloaders_every_n_epochs": 0,
        "_checkpoint_connector": SimpleNamespace(_loaded_checkpoint={}),
        "_val_check_time_interval": None,
        "barebones": False,
        "optimizers": [object()],
        "world_size": RANKS,
    }
    return SimpleNamespace(**{**values, **changed})


@pytest.mark.feature("Lightning", "manual optimization, other strategies, SWA and others", how="refused")
@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"lightning_module": SimpleNamespace(automatic_optimization=False)}, "manual optimization"),
        ({"callbacks": [StochasticWeightAveraging(0.1)]}, "StochasticWeightAveraging"),
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs"),
        ({"_val_check_time_interval": 60.0}, "a val_check_interval in time"),
        ({"barebones": True}, "barebones"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changed: dict[str, Any], names: str) -> None:
    with pytest.raises(UsageError, match=f"does not support {names}"):
        refusals.refuse_trainer(trainer(**changed), BOTH[0])


@pytest.mark.parametrize(
    ("optimizers", "names"),
    [([object(), object()], "2 optimizers"), ([torch.optim.LBFGS([torch.zeros(1, requires_grad=True)])], "LBFGS")],
)
def test_optimizers_are_looked_at_when_they_are_made(optimizers: list[Any], names: str) -> None:
    with pytest.raises(UsageError, match=names):
        refusals.refuse_trainer(trainer(optimizers=optimizers), BOTH[0], ready=True)


def test_averages_of_weights_are_supported() -> None:
    refusals.refuse_trainer(trainer(callbacks=[WeightAveraging()]), BOTH[0], ready=True)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


class Own(BatchSampler):
    """A batch sampler of the script's own."""


@pytest.mark.feature("Lightning", "streams (IterableDataset), a batch sampler", how="refused")
@pytest.mark.parametrize(
    ("given", "says"),
    [
        (DataLoader(Stream()), "is a stream"),
        ([DataLoader(range(4))], "is a stream"),  # type: ignore[arg-type]
        (DataLoader(range(4), batch_sampler=Own(range(4), 2, False)), "Own decides"),  # type: ignore[arg-type]
        (DataLoader(range(4), batch_size=2, sampler=RandomSampler(range(4))), "use_distributed_sampler"),  # type: ignore[arg-type]
        (DataLoader(range(4), num_workers=1, worker_init_fn=print), "worker_init_fn \\(print\\)"),  # type: ignore[arg-type]
        (DataLoader(range(1), batch_size=4, sampler=DistributedSampler(range(1), 2, 0), drop_last=True), "fewer than one batch"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_data_whose_order_does_not_follow_from_the_step_is_refused(given: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        refusals.refuse_loader(trainer(), given)


@pytest.mark.feature("Lightning", "validation between micro-batches of a step", how="refused")
@pytest.mark.parametrize(
    ("every", "batches", "each", "is_refused"),
    [(2, 6, 1, False), (6, 6, 1, False), (3, 6, 1, True), (2, 6, None, False), (2, 5, None, True), (5, 5, 1, False)],
)
def test_validation_between_micro_batches_is_refused(
    every: int, batches: int, each: int | None, is_refused: bool
) -> None:
    one = SimpleNamespace(
        val_check_batch=every, num_training_batches=batches, enable_validation=True, check_val_every_n_epoch=each
    )
    refusals.refuse_validation(one, 1)
    if is_refused:
        with pytest.raises(UsageError, match="falls between the 2 micro-batches"):
            refusals.refuse_validation(one, 2)
    else:
        refusals.refuse_validation(one, 2)


# -- scripts that are not touched
@pytest.mark.parametrize("before", ["", "import lightning.pytorch\n"])
def test_the_trainer_of_each_package_is_changed_wherever_it_is_imported(before: str) -> None:
    installed = [one.pytorch for one in BOTH if one.is_installed]
    lines = [f"{before}from rackrun.frameworks.lightning import script_unchanged", "script_unchanged.install()"]
    for name in reversed(installed):
        lines += [f"from {name} import Trainer", "made = Trainer(accelerator='cpu', logger=False)"]
        lines += [f"print({name!r}, type(made.strategy).__name__)"]
    run = [sys.executable, "-c", "\n".join(lines)]
    ran = subprocess.run(run, capture_output=True, text=True, timeout=90, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [f"{name} ElasticStrategy" for name in reversed(installed)]


def test_the_strategies_that_are_ddp_are_replaced() -> None:
    """In a process of its own, which becomes a worker."""
    ran = subprocess.run([sys.executable, "-c", STRATEGIES], capture_output=True, text=True, timeout=90, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "refused 'fsdp'"
