"""A rank that is slow on its own makes all of them slow: it is told apart by the time that it does not wait, and replaced."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import pytest

from tests.faults.scripts.strike import Fault
from tests.faults.trained import RANKS, Trained

pytestmark = pytest.mark.slow

Train = Callable[..., Trained]
Reference = Callable[..., Trained]
STEPS, LONGER = 36, 48
PATIENCE_S = 30.0
"""A step may take as long as a loaded host makes it: these stories are not about hangs."""
SLOW = 1
NOT_SLOW = [rank for rank in range(RANKS) if rank != SLOW]


DEALS = "SELECT body FROM events WHERE name = 'DealShards' ORDER BY id"
PLANS = "SELECT body FROM generations WHERE stage = 'resume' ORDER BY id"


def slow_from(step: int, rank: int = SLOW, delay_ms: float = 150.0) -> Fault:
    """In each of its two micro-batches: many times what a loaded host adds to a step of these."""
    return Fault(name=f"slow {rank}", place="forward", rank=rank, step=step, then="slow", delay_ms=delay_ms)


@pytest.mark.stories
@pytest.mark.parametrize("mode", [pytest.param("ddp", marks=pytest.mark.soak), "fsdp"])
def test_a_rank_that_becomes_slow_is_found_and_replaced_and_no_step_is_done_again(
    mode: str, train: Train, reference: Reference
) -> None:
    faults = [slow_from(8)]
    options = ["--slow-ranks", "swap", "--slow-after", 1]
    trained = train(mode, faults, steps=STEPS, options=options, patience_s=PATIENCE_S)
    trained.assert_same_training(reference(mode, STEPS), faults)
    (recovery,) = trained.recoveries
    (lost,) = recovery["lost"]
    assert recovery["planned"], trained
    assert (recovery["kind"], recovery["rollback"], recovery["redone"]) == ("swap", None, []), trained
    assert (lost["rank"], lost["how"].partition(":")[0]) == (SLOW, "slow"), trained
    assert set(rows(trained, "SELECT DISTINCT attempt FROM units")) == {0}, trained
    found = json.loads(rows(trained, "SELECT body FROM events WHERE name = 'SlowRanksChanged' ORDER BY id")[0])
    assert [one["rank"] for one in found["slow"]] == [SLOW], trained
    last = rows(trained, f"SELECT max(step) FROM units WHERE generation = {found['generation']}")[0]
    own = {rank: own_s(trained, rank, 8, last) for rank in range(RANKS)}
    assert own[SLOW] >= 0.3, own
    assert own[SLOW] > max(own[rank] for rank in NOT_SLOW), own


@pytest.mark.stories
@pytest.mark.parametrize("lost", [None, "beside it", "itself"])
def test_a_slow_rank_gets_fewer_micro_batches_and_it_is_the_same_training(
    lost: str | None, train: Train, reference: Reference
) -> None:
    """Also if a rank is lost as soon as that is told, wherever the others stand then."""
    dies = {"beside it": SLOW + 1, "itself": SLOW}.get(lost or "")
    kill = Fault(name="kill", place="before the gate", rank=dies, after="command DealShards")
    faults = [slow_from(8), *([kill] if lost else [])]
    options = ["--slow-ranks", "shift", "--slow-after", 1]
    trained = train("ddp", faults, steps=LONGER, options=options, patience_s=PATIENCE_S, reduction="exact")
    trained.assert_same_training(reference("ddp", LONGER, "exact"), faults)
    found = json.loads(rows(trained, "SELECT body FROM events WHERE name = 'SlowRanksChanged' ORDER BY id")[0])
    assert [one["rank"] for one in found["slow"]] == [SLOW], trained
    deals = [json.loads(body)["shares"] for body in rows(trained, DEALS)]
    assert all(gets_least(shares) for shares in deals), trained
    plans = [json.loads(body)["plan"]["shares"] for body in rows(trained, PLANS)]
    assert len(plans) == (2 if lost else 1), trained
    assert gets_least(plans[-1]) is (lost == "beside it"), trained
    if lost != "itself":  # whoever takes its place is not slow
        assert len(trained.samples[LONGER - 1][SLOW]) == 2, trained


@pytest.mark.stories
@pytest.mark.soak
def test_by_default_a_slow_rank_is_told_of_and_stays(train: Train, reference: Reference) -> None:
    faults = [slow_from(8)]
    trained = train("ddp", faults, steps=STEPS, options=["--slow-after", 1], patience_s=PATIENCE_S)
    trained.assert_same_training(reference("ddp", STEPS), faults)
    assert not trained.recoveries, trained
    assert any(said.startswith(f"rank {SLOW} on ") and " is slow: " in said for said in notices(trained)), trained


@pytest.mark.stories
@pytest.mark.parametrize("mode", ["ddp", pytest.param("fsdp", marks=pytest.mark.soak)])
def test_one_blip_of_two_seconds_is_nothing(mode: str, train: Train, reference: Reference) -> None:
    """All are a little slow, so that every step is worth a look and a blip is one of them."""
    blip = Fault(name="blip", place="forward", rank=SLOW, step=25, then="sleep", delay_ms=2000)
    faults = [*(slow_from(1, rank, 100) for rank in range(RANKS)), blip]
    options = ["--slow-ranks", "swap", "--slow-after", 1]
    trained = train(mode, faults, steps=STEPS, options=options, patience_s=PATIENCE_S)
    trained.assert_same_training(reference(mode, STEPS), faults)
    assert not trained.recoveries, trained
    assert not rows(trained, "SELECT body FROM events WHERE name = 'SlowRanksChanged'"), trained
    assert own_s(trained, SLOW, 25, 25) >= 2.0, trained


def gets_least(shares: Sequence[int]) -> bool:
    """One of the eight micro-batches of two; the others the rest."""
    return bool(shares) and (shares[SLOW], sum(shares)) == (1, 8)


def own_s(trained: Trained, rank: int, first: int, last: int) -> float:
    """A step's own time of a rank: the median over these steps."""
    return float(
        median(
            rows(
                trained,
                f"SELECT own_s FROM units WHERE phase = 0 AND rank = {rank} AND step BETWEEN {first} AND {last}",
            )
        )
    )


def notices(trained: Trained) -> list[str]:
    return rows(trained, "SELECT json_extract(body, '$.text') FROM events WHERE name = 'Notice' ORDER BY id")


def rows(trained: Trained, query: str) -> list[Any]:
    with contextlib.closing(sqlite3.connect(trained.ran.out_dir / "journal.sqlite")) as connection:
        return [value for (value,) in connection.execute(query)]
