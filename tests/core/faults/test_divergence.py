"""Who is to blame when replicas differ: who is outvoted at the first step at which not all digests of a shard are the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rackrun.core.faults.divergence import Pass, culprits
from rackrun.protocol.ids import Rank


def seen(**digests: list[int]) -> Pass:
    """``r0=[7, 8]``: rank 0, at steps 0 and 1."""
    return {Rank(int(name[1:])): dict(enumerate(found)) for name, found in digests.items()}


def kinds(*ranks: tuple[int, ...]) -> list[list[Rank]]:
    return [[Rank(rank) for rank in kind] for kind in ranks]


def test_replicas_that_agree_blame_nobody() -> None:
    assert culprits(kinds((0, 1), (2, 3)), [seen(r0=[1, 2], r1=[1, 2], r2=[5, 6], r3=[5, 6])]) is None


def test_of_three_the_one_is_outvoted() -> None:
    assert culprits(kinds((0, 1, 2)), [seen(r0=[1], r1=[9], r2=[1])]) == (1,)


def test_of_two_nobody_is() -> None:
    assert culprits(kinds((0, 1)), [seen(r0=[1], r1=[9])]) == ()


def test_two_against_two_is_no_majority_nor_is_two_against_one_and_one() -> None:
    assert culprits(kinds((0, 1, 2, 3)), [seen(r0=[1], r1=[1], r2=[9], r3=[9])]) == ()
    assert culprits(kinds((0, 1, 2, 3)), [seen(r0=[1], r1=[1], r2=[8], r3=[9])]) == ()


def test_of_two_that_compute_twice_the_one_is_wrong_whose_digest_does_not_come_again() -> None:
    """Rank 1 was wrong at step 1; at step 2 its gradients had spoilt rank 0 too."""
    first, second = seen(r0=[1, 2, 7], r1=[1, 9, 8]), seen(r0=[1, 2, 3], r1=[1, 2, 3])
    assert culprits(kinds((0, 1)), [first, second]) == (1,)


def test_the_later_one_is_not_blamed_for_what_the_earlier_one_did_to_it() -> None:
    """Rank 3 holds another shard: the one that it shares with rank 2 differs first."""
    first = seen(r0=[1, 2, 7], r1=[1, 2, 7], r2=[5, 6, 4], r3=[5, 9, 8])
    second = seen(r0=[1, 2, 3], r1=[1, 2, 3], r2=[5, 6, 0], r3=[5, 6, 0])
    assert culprits(kinds((0, 1), (2, 3)), [first, second]) == (3,)


def test_what_comes_again_on_both_is_nobodys() -> None:
    assert culprits(kinds((0, 1)), [seen(r0=[1], r1=[9]), seen(r0=[1], r1=[9])]) == ()


def test_who_is_wrong_twice_in_two_ways_is_told_from_who_repeats_itself() -> None:
    assert culprits(kinds((0, 1)), [seen(r0=[1], r1=[8]), seen(r0=[1], r1=[9])]) == (1,)


def test_two_that_repeat_themselves_each_in_its_own_way_are_not_told_apart_by_a_third_that_does_not() -> None:
    assert culprits(kinds((0, 1, 2)), [seen(r0=[1], r1=[2], r2=[3]), seen(r0=[1], r1=[2], r2=[4])]) == ()


def test_nobody_repeats_itself() -> None:
    assert culprits(kinds((0, 1)), [seen(r0=[1], r1=[2]), seen(r0=[3], r1=[4])]) == ()


def test_two_times_that_are_each_alike_and_not_the_same_are_nobodys() -> None:
    """Kernels that are not deterministic."""
    assert culprits(kinds((0, 1)), [seen(r0=[1], r1=[1]), seen(r0=[2], r1=[2])]) == ()


def test_a_step_that_somebody_has_not_seen_says_nothing() -> None:
    """Rank 0 has joined after the step at which rank 1 was wrong: both are spoilt, and rank 0 is not blamed for it."""
    first = {Rank(0): {2: 7}, Rank(1): {1: 9, 2: 8}}
    second = seen(r0=[1, 2, 3], r1=[1, 2, 3])
    assert culprits(kinds((0, 1)), [first, second]) == ()


def test_two_wrong_shards_at_once() -> None:
    assert culprits(kinds((0, 1, 2), (3, 4, 5)), [seen(r0=[1], r1=[9], r2=[1], r3=[2], r4=[2], r5=[7])]) == (1, 5)


@given(st.integers(2, 6), st.data())
def test_one_flip_is_never_blamed_on_somebody_else(replicas: int, data: st.DataObject) -> None:
    """Digests as a fault leaves them: the one rank differs from its step on, all others from the step after on, all alike."""
    steps, wrong = data.draw(st.integers(1, 5)), data.draw(st.integers(0, replicas - 1))
    at = data.draw(st.integers(0, steps - 1))
    first = {
        Rank(rank): {
            step: step if step < at or (step == at and rank != wrong) else 100 + step + (1000 if rank == wrong else 0)
            for step in range(steps)
        }
        for rank in range(replicas)
    }
    second = {Rank(rank): {step: step for step in range(steps)} for rank in range(replicas)}
    every = [[Rank(rank) for rank in range(replicas)]]
    alone = culprits(every, [{rank: {steps - 1: digests[steps - 1]} for rank, digests in first.items()}])
    assert alone == ((wrong,) if replicas > 2 else ())
    assert culprits(every, [first, second]) == (wrong,)
