"""What is lost is no rank: a spare, an agent with all its workers, the launcher."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.scripts.strike import CLOCK, Fault
from tests.faults.trained import RANKS, Trained

pytestmark = pytest.mark.slow

Train = Callable[..., Trained]
Reference = Callable[[str], Trained]


@pytest.mark.stories
@pytest.mark.parametrize("spares", [1, 2])
def test_a_waiting_spare_is_lost_and_later_a_rank(spares: int, train: Train, reference: Reference) -> None:
    """With a second spare that one takes over; otherwise a new one is started for it."""
    faults = [
        Fault(name="now", place="between steps", rank=0, step=3, then="mark"),
        Fault(name="spare", place=CLOCK, rank=None, after="now"),
        Fault(name="lost", place="backward", rank=1, step=8, after="spare"),
    ]
    trained = train("ddp", faults, spares=spares)
    trained.assert_same_training(reference("ddp"), faults)
    assert [recovery["kind"] for recovery in trained.recoveries] == ["swap"], trained


@pytest.mark.stories
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_tray_is_lost(mode: str, train: Train, reference: Reference) -> None:
    """Its agent is killed, and with it all its ranks and its snapshots; the other tray has a spare for each, and copies."""
    fault = Fault(name="agent", place="backward", rank=1, step=7, then="AGENT")
    trained = train(mode, [fault], spares=RANKS, trays=2)
    trained.unheard = frozenset(lost["rank"] for recovery in trained.recoveries for lost in recovery["lost"])
    trained.assert_same_training(reference(mode), [fault])
    assert {lost["how"].partition(":")[0] for r in trained.recoveries for lost in r["lost"]} == {"tray lost"}, trained
    assert {recovery["kind"] for recovery in trained.recoveries} == {"swap"}, trained


def from_memory(recovery: dict[str, Any]) -> bool:
    """From a snapshot of some step; None: of exactly what is committed, so nobody went back."""
    return recovery["rollback"] is None or recovery["rollback"] >= 2


@pytest.mark.parametrize("copies", [pytest.param(copies, marks=pytest.mark.stories) for copies in ("xor", "xor:2")])
def test_a_tray_is_lost_and_its_shard_is_rebuilt_from_parity(copies: str, train: Train, reference: Reference) -> None:
    """Four trays of one rank, and one with a spare. Nobody has a copy of the lost shard; it goes on from memory all the same."""
    fault = Fault(name="agent", place="backward", rank=1, step=9, then="AGENT")
    trained = train("fsdp", [fault], spares=1, trays=5, copies=copies)
    trained.unheard = frozenset({1})
    trained.assert_same_training(reference("fsdp"), [fault])
    (recovery,) = trained.recoveries
    assert (recovery["kind"], from_memory(recovery)) == ("swap", True), trained
    sets = {"xor": ("sets of 4 trays", "33%"), "xor:2": ("sets of 2 trays", "100%")}[copies]
    assert all(f"{said}" in trained.ran.stderr for said in sets), trained


@pytest.mark.stories
@pytest.mark.parametrize(("rank", "trays", "spares"), [(1, 6, 2), pytest.param(0, 6, 2, marks=pytest.mark.soak)])
def test_two_trays_of_a_set_are_lost_together_and_both_shards_are_rebuilt(
    rank: int, trays: int, spares: int, train: Train, reference: Reference
) -> None:
    """Four trays of one rank, which are one set of two and two; two trays of it die in the same step, and the rest goes on from memory."""
    pytest.importorskip("pyeclib")
    fault = Fault(name="both", place="backward", rank=rank, step=9, then="AGENT AND HOLDER")
    trained = train("fsdp", [fault], spares=spares, trays=trays, copies="rs:2+2")
    trained.unheard = frozenset({rank, rank + 1})
    trained.assert_same_training(reference("fsdp"), [fault])
    assert {recovery["kind"] for recovery in trained.recoveries} == {"swap"}, trained
    assert {lost["rank"] for recovery in trained.recoveries for lost in recovery["lost"]} == {rank, rank + 1}, trained
    assert all(map(from_memory, trained.recoveries)), trained
    assert "any two trays may be lost" in trained.ran.stderr, trained


@pytest.mark.stories
def test_twice_two_trays_are_lost_together(train: Train, reference: Reference) -> None:
    """In between, the world has formed new sets, and the newcomers have given their stripes too."""
    pytest.importorskip("pyeclib")
    faults = [
        Fault(name="first", place="backward", rank=1, step=5, then="AGENT AND HOLDER"),
        Fault(name="second", place="backward", rank=0, step=12, then="AGENT AND HOLDER", after="first"),
    ]
    trained = train("fsdp", faults, spares=5, trays=9, copies="rs:2+2")
    trained.unheard = frozenset(range(4))
    trained.assert_same_training(reference("fsdp"), faults)
    assert {recovery["kind"] for recovery in trained.recoveries} == {"swap"}, trained


@pytest.mark.stories
def test_two_trays_are_lost_one_after_the_other(train: Train, reference: Reference) -> None:
    """In between, the world has formed new sets, and the newcomer has given its stripes too."""
    faults = [
        Fault(name="first", place="backward", rank=1, step=5, then="AGENT"),
        Fault(name="second", place="backward", rank=2, step=12, then="AGENT", after="first"),
    ]
    trained = train("fsdp", faults, spares=2, trays=6, copies="xor")
    trained.unheard = frozenset({1, 2})
    trained.assert_same_training(reference("fsdp"), faults)
    assert [recovery["kind"] for recovery in trained.recoveries] == ["swap", "swap"], trained


def test_nothing_is_left_when_the_launcher_is_killed(train: Train) -> None:
    trained = train("ddp", [Fault(name="launcher", place="backward", rank=1, step=6, then="LAUNCHER")])
    assert trained.ran.exit_code == -signal.SIGKILL, trained
    assert "launcher" in trained.struck, trained
    assert not trained.ran.left_behind, trained
    assert len(trained.held) < RANKS, trained
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(trained.address)
