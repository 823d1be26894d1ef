"""Whole jobs on hosts of their own, whose network is cut: each ends with the bits of the one without."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from rackrun.chaos.faults.fault_types import Subjects
from rackrun.chaos.faults.network.bad_link import Link
from rackrun.chaos.faults.network.network_partition import Partition
from rackrun.chaos.faults.processes.kill import Kill
from rackrun.chaos.faults.table.fault_table import Fault
from rackrun.chaos.faults.targets import Exactly
from rackrun.chaos.plan.definition import AtStep, FlipFlop, Inject, Par, Part, Plan, Seq
from rackrun.chaos.runs.reference_run import run_reference
from rackrun.chaos.runs.run_plan import Summary, run_plan
from rackrun.chaos.testbed.network.hosts import hosts_here

pytestmark = [
    pytest.mark.slow,
    pytest.mark.stories,
    pytest.mark.timeout(600),  # three launchers import torch, and some wait for leases
    pytest.mark.skipif(hosts_here() is not None, reason=", ".join(hosts_here() or ())),
]

SCRIPT = Path(__file__).parents[1] / "scripts" / "tiny.py"
STEPS, HOLD = 60, 6
LEASE_S = 8
COMMAND = [
    *("--trays", "3", "--nproc-per-node", "1", "--spares", "1", "--lease", str(LEASE_S)),
    *(str(SCRIPT), str(STEPS), str(HOLD), "{out}", "1"),
]
PACE = {"TINY_PACE": "0.4"}
"""So that training lasts longer than any fault here."""
TRAY, AGENT = Exactly(Subjects.TRAY, ("tray-01",)), Exactly(Subjects.AGENT, ("tray-01",))
HEADS = Exactly(Subjects.TRAY, ("tray-00",))
"""Whose launcher hosts the coordinator."""


def at_hold(fault: Fault, target: Exactly = TRAY) -> Inject:
    return Inject(fault=fault, target=target, when=AtStep(step=HOLD - 1))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("without") / "reference"
    run_reference(COMMAND, folder)
    return folder


@pytest.fixture
def strike(tmp_path: Path, reference: Path) -> Callable[[Part], Summary]:
    def run(part: Part) -> Summary:
        summary = run_plan(Plan(plan=part, seed=3), COMMAND, out=tmp_path / "out", reference=reference, env=PACE)
        print(msgspec.json.format(msgspec.json.encode(summary), indent=1).decode(), file=sys.stderr)
        for path in sorted((tmp_path / "out" / "faulted").glob("stderr*")):
            print(f"{path.name}:", path.read_text(), file=sys.stderr)
        return summary

    return run


UNHARMED: dict[str, Part] = {
    "it does not reach the coordinator for less than half a lease": at_hold(
        Partition(shape="from_coordinator", for_s=LEASE_S / 2 - 1)
    ),
    "it does not reach its peers, and then does": at_hold(Partition(shape="from_peers", for_s=5.0)),
    "its peers refuse it, and then do not": at_hold(Partition(shape="from_peers", loud=True, for_s=5.0)),
    "its link flaps": Seq(
        parts=(
            at_hold(Link(lost=0.1, for_s=3.0), AGENT),
            FlipFlop(fault=Partition(), target=TRAY, times=4, on_s=1.5, off_s=1.0),
        )
    ),
    "its link is reset": at_hold(Link(reset=True, for_s=LEASE_S / 2 - 1), AGENT),
    "what it is told is lost, until it takes its link up again": at_hold(
        Link(replies_lost=True, for_s=2.0 * LEASE_S), AGENT
    ),
}


@pytest.mark.parametrize("name", UNHARMED)
def test_a_network_that_heals_in_time_costs_nobody(name: str, strike: Callable[[Part], Summary]) -> None:
    summary = strike(UNHARMED[name])
    assert summary.holds is True
    assert not any("lost" in line for line in summary.recoveries)


REPLACED: dict[str, tuple[Part, str]] = {
    "the coordinator hears nothing of it": (
        at_hold(Partition(shape="from_coordinator", for_s=2.0 * LEASE_S)),
        "no word from its agent",
    ),
    "it hears, and is not heard": (at_hold(Partition(shape="one_way", for_s=2.0 * LEASE_S)), "tray-01/0"),
    "it never reaches its peers again": (at_hold(Partition(shape="from_peers")), "which others did"),
    "it is the tray beside the coordinator": (at_hold(Partition(for_s=2.0 * LEASE_S), HEADS), "tray-00/0"),
}


@pytest.mark.parametrize("name", REPLACED)
def test_who_is_cut_off_is_replaced_and_nobody_else(name: str, strike: Callable[[Part], Summary]) -> None:
    part, said = REPLACED[name]
    summary = strike(part)
    assert summary.holds is True
    assert [said in line for line in summary.recoveries if "lost" in line] == [True]


def test_a_coordinator_that_is_cut_off_from_all_for_longer_than_a_lease_gives_nobody_up(
    strike: Callable[[Part], Summary],
) -> None:
    everybody = Exactly(Subjects.TRAY, ("tray-00", "tray-01", "tray-02"))
    summary = strike(at_hold(Partition(shape="from_coordinator", for_s=1.5 * LEASE_S), everybody))
    assert summary.holds is True
    assert not summary.recoveries


def test_a_network_that_heals_in_the_middle_of_a_recovery_brings_the_newcomer_in(
    strike: Callable[[Part], Summary],
) -> None:
    killed = at_hold(Kill(), Exactly(Subjects.RANK, ("1",)))
    cut = at_hold(Partition(shape="from_peers", for_s=5.0), Exactly(Subjects.TRAY, ("tray-02",)))
    summary = strike(Par(parts=(cut, killed)))
    assert summary.holds is True
    assert len([line for line in summary.recoveries if "lost" in line]) == 1
