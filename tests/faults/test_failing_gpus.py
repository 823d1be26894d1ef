"""GPUs fail under training ranks and under spares, as their driver tells: each leads to its response, and it is the same training.

The driver is a compiled library that the real binding talks to, one for each tray of a simulated rack; the rest is a whole job.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rackrun.chaos.testbed.fake_nvml.fake_driver import FakeRack, build
from rackrun.core.recovery.fencing import FENCE_WAIT_MS
from rackrun.topology.model.rack_file import read_rack_file
from tests.faults.scripts.strike import CLOCK, Fault
from tests.faults.trained import RANKS, Trained

pytestmark = pytest.mark.slow

Train = Callable[..., Trained]
Reference = Callable[[str], Trained]
RESPONSE_S = 1.0
RACK = """
format: 1
racks:
  - serial: "1825024170029"
    trays: {{count: {trays}, gpus: 1}}
    nvlink: {{domain: 5f4e0c3a-7d1b-4c6e-9a55-0d2f6b8e1c47, clique: 32766}}
"""
GPU_IS_LOST, RESET_REQUIRED = 15, 16

FENCED: dict[str, tuple[dict[str, int | dict[str, int]], str]] = {
    "Xid 79": ({"xid": 79, "error": GPU_IS_LOST}, "lost"),
    "a fatal 149": ({"recovery_action": 1, "xid": 149}, "reset"),
    "recovery action 1": ({"recovery_action": 1}, "reset"),
    "recovery action 5": ({"recovery_action": 5}, "fabric"),
    "recovery action 2": ({"recovery_action": 2}, "reboot"),
    "recovery action 3": ({"recovery_action": 3}, "drain_p2p"),
    "the fabric gone": ({"fabric_state": 2}, "fabric"),
    "a reset required": ({"error": RESET_REQUIRED}, "reset"),
    "Xid 31": ({"xid": 31}, "app"),
}
"""What the driver says, and how the GPU is then. In threes, and never two that speak against the fabric: those would be the switch's."""
SWAPPED: dict[str, tuple[dict[str, int | dict[str, int]], str]] = {
    "a row that waits for a reset": ({"remapped": {"2": 1}}, "degraded"),
    "a link down": ({"link_state": {"11": 0}}, "degraded"),
    "recovery action 4": ({"recovery_action": 4}, "degraded"),
    "recovery action 6": ({"recovery_action": 6}, "unknown"),
    "recovery action 7": ({"recovery_action": 7}, "unknown"),
}
STEPS_OF_FAULTS = (3, 6, 9)


@pytest.fixture
def rack(tmp_path: Path) -> Iterator[Callable[[int], FakeRack]]:
    """``rack(trays)``: a rack of trays with one GPU each, one NVLink clique, and its driver."""
    made: list[FakeRack] = []

    def make(trays: int) -> FakeRack:
        file = tmp_path / "rack.yaml"
        file.write_text(RACK.format(trays=trays))
        build(tmp_path)
        made.append(FakeRack.create(tmp_path / "rack.state", read_rack_file(file)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def in_threes(kinds: dict[str, Any], mode: str, first: int) -> list[Any]:
    """``first``: so many in ``make test``; the others in ``make stories``."""
    names = list(kinds)
    stories = [names[at : at + 3] for at in range(0, len(names), 3)]
    return [
        pytest.param(mode, story, id=f"{mode}: {'; '.join(story)}", marks=[pytest.mark.stories] if at >= first else [])
        for at, story in enumerate(stories)
    ]


@pytest.mark.parametrize(("mode", "story"), [*in_threes(FENCED, "ddp", 0), *in_threes(FENCED, "fsdp", 0)])
def test_a_gpu_beyond_use_is_left_at_once(
    mode: str, story: Sequence[str], train: Train, reference: Reference, rack: Callable[[int], FakeRack]
) -> None:
    faults = [
        Fault(name=name, place="backward", rank=rank, step=step, then="GPU", gpu=FENCED[name][0])
        for rank, (name, step) in enumerate(zip(story, STEPS_OF_FAULTS, strict=False))
    ]
    trained = train(mode, faults, spares=3, rack=rack(RANKS + 3))
    trained.assert_same_training(reference(mode), faults)
    assert [recovery["kind"] for recovery in trained.recoveries] == ["swap"] * len(story), trained
    assert [lost["how"].partition(":")[0] for one in trained.recoveries for lost in one["lost"]] == [
        f"GPU 0 is {FENCED[name][1]}" for name in story
    ], trained
    assert_told_in_time(trained, faults, "CondemnWorker")
    assert_broken_before_killed(trained)


@pytest.mark.parametrize(("mode", "story"), [*in_threes(SWAPPED, "fsdp", 0), *in_threes(SWAPPED, "ddp", 0)])
def test_a_failing_gpu_is_left_between_two_steps_and_no_step_is_done_again(
    mode: str, story: Sequence[str], train: Train, reference: Reference, rack: Callable[[int], FakeRack]
) -> None:
    faults = [
        Fault(
            name=name, place="backward", rank=rank, step=step, then="GPU", gpu=SWAPPED[name][0],
            until="command PauseWorkers",
        )
        for rank, (name, step) in enumerate(zip(story, STEPS_OF_FAULTS, strict=False))
    ]  # fmt: skip
    trained = train(mode, faults, spares=3, rack=rack(RANKS + 3))
    trained.assert_same_training(reference(mode), faults)
    assert [recovery["planned"] for recovery in trained.recoveries] == [True] * len(story), trained
    assert [(one["rollback"], one["redone"]) for one in trained.recoveries] == [(None, [])] * len(story), trained
    assert attempts(trained) == {0}, trained
    assert_told_in_time(trained, faults, "PauseWorkers")


@pytest.mark.stories
def test_a_spare_whose_fabric_is_not_completed_is_not_used(
    train: Train, reference: Reference, rack: Callable[[int], FakeRack]
) -> None:
    """Two spares wait; the first in order has fallen out of its fabric when a rank is lost."""
    faults = [
        Fault(name="now", place="between steps", rank=0, step=3, then="mark"),
        Fault(
            name="spare", place=CLOCK, rank=None, after="now", then="GPU", gpu={"fabric_state": 2},
            until="event DeviceChecked",
        ),
        Fault(name="held back", place="forward", rank=1, step=4, then="wait", until="lost"),
        Fault(name="lost", place=CLOCK, rank=1, after="event DeviceChecked"),
    ]  # fmt: skip
    trained = train("ddp", faults, spares=2, rack=rack(RANKS + 2))
    trained.assert_same_training(reference("ddp"), faults)
    (recovery,) = trained.recoveries
    (lost,) = recovery["lost"]
    unfit = [said.partition(",")[0] for said in notices(trained) if "a spare, may not be used" in said]
    assert len(unfit) == 1, trained
    assert lost["to"] not in (None, *unfit), trained


@pytest.mark.stories
def test_two_trays_that_lose_the_fabric_at_once_are_the_switch_and_nobody_is_taken_out(
    train: Train, reference: Reference, rack: Callable[[int], FakeRack]
) -> None:
    faults = [
        Fault(name="one", place="backward", rank=1, step=4, then="GPU", gpu={"fabric_state": 2}, until="event DeviceJudged"),
        Fault(name="two", place="forward", rank=2, step=5, then="GPU", gpu={"fabric_state": 2}, until="event DeviceJudged"),
    ]  # fmt: skip
    trained = train("ddp", faults, spares=2, rack=rack(RANKS + 2))
    trained.assert_same_training(reference("ddp"), faults)
    assert not trained.recoveries, trained
    assert any("a switch or the fabric manager, not their GPUs" in said for said in notices(trained)), trained


def attempts(trained: Trained) -> set[int]:
    return set(journal(trained, "SELECT DISTINCT attempt FROM units"))


def notices(trained: Trained) -> list[str]:
    return journal(trained, "SELECT json_extract(body, '$.text') FROM events WHERE name = 'Notice' ORDER BY id")


def journal(trained: Trained, query: str) -> list[Any]:
    with contextlib.closing(sqlite3.connect(trained.ran.out_dir / "journal.sqlite")) as connection:
        return [value for (value,) in connection.execute(query)]


def assert_broken_before_killed(trained: Trained) -> None:
    """Whoever lived was killed when all others had left the generation, or half a second after they were told to."""
    wanted = "('CondemnWorker', 'BreakGeneration', 'WorkerParked', 'FenceWorker')"
    with contextlib.closing(sqlite3.connect(trained.ran.out_dir / "journal.sqlite")) as connection:
        rows = connection.execute(f"SELECT name, at_ms, body FROM events WHERE name IN {wanted} ORDER BY id").fetchall()
    told = [(name, at_ms, msgspec.json.decode(body)) for name, at_ms, body in rows]
    fences = [at for at, (name, _, body) in enumerate(told) if name == "FenceWorker" and not body["swept_along"]]
    assert fences, trained
    for at in fences:
        slot, before = told[at][2]["slot"], told[:at]
        condemned = max(i for i, one in enumerate(before) if one[0] == "CondemnWorker" and one[2]["slot"] == slot)
        broken = max(i for i, one in enumerate(before) if one[0] == "BreakGeneration")
        generation, left = told[broken][2]["generation"], {worker[0] for worker in told[broken][2]["workers"]}
        parked = {
            one[2]["slot"] for one in before[broken:] if one[0] == "WorkerParked" and one[2]["generation"] == generation
        }
        waited_ms = told[at][1] - told[condemned][1]
        assert left <= parked or waited_ms >= FENCE_WAIT_MS, (slot, left - parked, waited_ms, trained)


def assert_told_in_time(trained: Trained, faults: Sequence[Fault], command: str) -> None:
    walls = journal(trained, f"SELECT wall FROM events WHERE name = '{command}' ORDER BY id")
    for fault in faults:
        struck = trained.struck[fault.name]["wall"]
        after = min(wall - struck for wall in walls if wall >= struck)
        print(f"{fault.name}: {command} after {after:.2f} s")
        assert after <= RESPONSE_S, f"{fault.name}: {after:.2f} s\n{trained}"
