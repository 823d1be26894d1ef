"""Checkpoints of buffers that replicas do not share: BatchNorm's statistics are each rank's own, and rank 0's count."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from rackrun.worker.loop.run import Run
from tests.worker.harness import Ended
from tests.worker.scripts import Script, adam, ddp, fit

Train = Callable[..., Ended]


def trained(steps: int, monkeypatch: pytest.MonkeyPatch) -> Script:
    monkeypatch.setattr("tests.worker.scripts.STEPS", steps)

    def main(run: Run) -> None:
        model = ddp(run, nn.BatchNorm1d(14))
        fit(run, model, adam(model))

    return main


def statistics(ended: Ended) -> dict[int, dict[str, str]]:
    """Rank -> its buffers' bits."""
    assert ended.exit_code == 0, ended
    return {
        rank: {path: bits for path, bits in held.items() if "/buffer/" in path} for rank, held in ended.state.items()
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RACKRUN_CHECKPOINT_DIR", str(tmp_path))
    monkeypatch.setenv("RACKRUN_CHECKPOINT_EVERY", "2")
    return tmp_path


def test_every_rank_of_a_job_of_the_same_size_goes_on_with_its_own(
    folder: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = statistics(train(trained(4, monkeypatch), spares=0))
    assert len({str(held) for held in first.values()}) == 3, "replicas differ"
    assert statistics(train(trained(4, monkeypatch), spares=0)) == first
    resumed = statistics(train(trained(7, monkeypatch), spares=0))
    monkeypatch.delenv("RACKRUN_CHECKPOINT_DIR")
    assert resumed == statistics(train(trained(7, monkeypatch), spares=0))


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)])
def test_in_a_job_of_another_size_all_go_on_with_those_of_rank_0(
    before: int, after: int, folder: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = statistics(train(trained(4, monkeypatch), ranks=before, spares=0))
    second = statistics(train(trained(4, monkeypatch), ranks=after, spares=0))
    assert second == dict.fromkeys(range(after), first[0])
