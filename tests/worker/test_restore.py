"""A newcomer is filled from several live replicas at once, and what they give is compared."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from harness import Ended, moments
from scripts import Samples, adam
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from rackrun.worker import neighbour
from rackrun.worker.manifest import TensorInfo
from rackrun.worker.restore_transfer import landing_places
from rackrun.worker.run import Run
from rackrun.worker.step import Step

Train = Callable[..., Ended]


def wide(damage: str = "") -> Callable[[Run], None]:
    """A tensor too large to travel packed. ``damage``: rank 1 changes a bit of its own there, in step 4."""

    def main(run: Run) -> None:
        model = DDP(nn.Sequential(nn.Linear(10, 4000), nn.Tanh(), nn.Linear(4000, 10)))
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())

        @run.step
        def step(step: Step) -> None:
            for batch in data:
                step.backward((model(batch) - batch).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            if damage and int(step) == 4 and run.rank == 1:
                with torch.no_grad():
                    getattr(model.module[0], damage).view(-1)[7] += 1e-6

        for number in run.steps(8):
            step(number)

    return main


@pytest.mark.parametrize("readable", [0, 1, 2])
def test_state_comes_from_two_sources_bit_for_bit(readable: int, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """From memory that may be read, and over sockets from those whose memory may not."""
    answers = iter([True] * readable + [False] * (2 - readable) + [True] * readable)  # asked again after reading
    monkeypatch.setattr(neighbour.Neighbour, "is_there", lambda _: next(answers))
    reference = train(wide())
    ended = train(wide(), kill={2: moments(reference, 2, "wide")[0]})
    assert not ended.differences(reference), ended
    assert ended.plans[0].restores[0].sources == (0, 1)


def test_what_arrives_is_written_straight_into_tensors_that_lie_as_at_their_source() -> None:
    """Memory between costs a page fault for every 4 KiB of state, in the middle of a recovery."""
    rows, columns = torch.zeros(4, 6), torch.zeros(6, 4).t()
    last = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    found = {
        path: (TensorInfo(path, "float32", tuple(like.shape), False, False, strides), tensor)
        for path, like, strides, tensor in (
            ("row-major", rows, (), rows),
            ("channels last", last, last.stride(), last),
            ("row-major, here by columns", rows, (), columns),
            ("channels last, here row-major", last, last.stride(), torch.zeros(2, 3, 4, 5)),
        )
    }
    places = landing_places(found, torch.device("cpu"))
    assert [path for path, place in places.items() if place is not None] == ["row-major", "channels last"]
    assert places["row-major"].data_ptr() == rows.data_ptr()  # type: ignore[union-attr]


def test_a_source_that_goes_while_it_is_read_is_no_source(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process number may be another's by now: what was read does not count, and the next plan reads again."""
    answers = itertools.chain([True, True, False], itertools.repeat(True))
    monkeypatch.setattr(neighbour.Neighbour, "is_there", lambda _: next(answers))
    reference = train(wide())
    ended = train(wide(), kill={2: moments(reference, 2, "wide")[0]})
    assert not ended.differences(reference), ended
    assert len(ended.plans) == 2


@pytest.mark.parametrize("damage", ["weight", "bias"])
def test_a_replica_that_has_diverged_is_found_before_anyone_trains_on_it(damage: str, train: Train) -> None:
    reference = train(wide())
    late = max(i for i, what in enumerate(reference.moments[2]) if what.startswith("committed")) - 1
    ended = train(wide(damage), kill={2: late}, max_restarts=0)
    assert ended.exit_code == 3, ended
    assert "could not be restored on 3 slots" in ended.because
