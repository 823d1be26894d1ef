"""Who keeps whose copy or parity, against brute force over every loss of k ranks or domains."""

from __future__ import annotations

import random
from collections.abc import Iterable
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rackrun.checkpoint.redundancy.failure_domain_sets import Site, assign_holders, form_sets
from rackrun.checkpoint.redundancy.shard_placement import (
    LEVELS,
    Labels,
    Level,
    PlacementError,
    Redundancy,
    ShardPlacement,
    place,
)


def cluster(*racks: Iterable[int]) -> dict[int, Labels]:
    """``cluster([4, 4], [2])``: a rack with two trays of 4 ranks, and one with a tray of 2."""
    where = [
        (f"r{r}", f"r{r}/t{t}") for r, trays in enumerate(racks) for t, count in enumerate(trays) for _ in range(count)
    ]
    return {rank: Labels(rack=rack, tray=tray) for rank, (rack, tray) in enumerate(where)}


def domain(labels: dict[int, Labels], rank: int, level: Level) -> str | int:
    return labels[rank].at(level) or rank


def is_recoverable(plan: ShardPlacement, lost: frozenset[int], shard_of: dict[int, object]) -> bool:
    """From first principles: go on rebuilding, whole sets at a time, until nothing changes."""
    alive = {shard for rank, shard in shard_of.items() if rank not in lost}
    alive |= {shard_of[sender] for sender, holders in plan.sends.items() if not lost.issuperset(holders)}
    # A member's parity is gone with it, so a set with one lost member too many rebuilds none, whatever else is known.
    most = plan.redundancy.parity
    alive |= {shard_of[r] for members in plan.sets if len(lost.intersection(members)) <= most for r in members}
    return alive == set(shard_of.values())


def losses(ranks: Iterable[int], most: int) -> Iterable[frozenset[int]]:
    ranks = list(ranks)
    return (frozenset(lost) for k in range(most + 1) for lost in combinations(ranks, k))


clusters = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=1, max_size=3).map(
    lambda r: cluster(*r)
)
small = clusters.filter(lambda labels: len(labels) <= 9)
levels = st.sampled_from(["process", "tray", "rack"])
redundancies = st.one_of(
    st.builds(Redundancy.mirror, st.integers(2, 3), levels),
    st.builds(Redundancy.xor, st.integers(2, 9), levels),
    st.builds(Redundancy.rs, st.integers(1, 6), st.integers(1, 3), levels),
)


# -- what every plan keeps ---------------------------------------------------------------------------------------------


@given(small, redundancies, st.data())
def test_survives_agrees_with_brute_force_over_all_subsets(
    labels: dict[int, Labels], redundancy: Redundancy, data: st.DataObject
) -> None:
    shard_of = {rank: data.draw(st.integers(0, len(labels))) for rank in labels}
    try:
        plan = place(labels, redundancy, shard_of)
    except PlacementError:
        assume(False)
    for lost in losses(labels, 4):
        assert plan.survives(lost) == is_recoverable(plan, lost, dict(shard_of))


@given(clusters, redundancies, st.data())
def test_the_protected_level_is_protected(
    labels: dict[int, Labels], redundancy: Redundancy, data: st.DataObject
) -> None:
    """Any loss of copies - 1 domains (one domain, for a set) leaves every shard."""
    replicas = data.draw(st.none() | st.fixed_dictionaries({rank: st.integers(0, 20) for rank in labels}))
    try:
        plan = place(labels, redundancy, replicas)
    except PlacementError:
        assume(False)
    names = sorted({str(domain(labels, rank, redundancy.across)) for rank in labels})
    bearable = redundancy.width - 1 if redundancy.kind == "mirror" else 1
    for lost in combinations(names, min(bearable, len(names))):
        assert plan.survives({rank for rank in labels if str(domain(labels, rank, redundancy.across)) in lost})
    assert (plan.tolerance(redundancy.across) or 0) >= bearable


@given(small, redundancies, levels, st.data())
def test_the_stated_tolerance_is_the_true_one(
    labels: dict[int, Labels], redundancy: Redundancy, level: Level, data: st.DataObject
) -> None:
    replicas = data.draw(st.none() | st.fixed_dictionaries({rank: st.integers(0, 8) for rank in labels}))
    try:
        plan = place(labels, redundancy, replicas)
    except PlacementError:
        assume(False)
    names = sorted({str(domain(labels, rank, level)) for rank in labels})
    of = {name: {rank for rank in labels if str(domain(labels, rank, level)) == name} for name in names}
    survived = {
        k: [plan.survives(set().union(*(of[name] for name in lost))) for lost in combinations(names, k)]
        for k in range(1, len(names) + 1)
    }
    stated = plan.tolerance(level)
    assert stated is not None
    assert all(all(survived[k]) for k in range(1, stated + 1))
    if plan.redundancy.kind == "mirror" or replicas is None:
        assert not all(survived[stated + 1]), "more is survived than is stated"
    for k, outcomes in survived.items():
        assert plan.recoverable(level, k) == Fraction(sum(outcomes), len(outcomes))


@given(clusters, redundancies, st.randoms(use_true_random=False))
def test_the_plan_does_not_depend_on_the_order_of_the_table(
    labels: dict[int, Labels], redundancy: Redundancy, shuffler: random.Random
) -> None:
    items = list(labels.items())
    shuffler.shuffle(items)
    outcomes: list[ShardPlacement | str] = []
    for table in (labels, dict(items)):
        try:
            outcomes.append(place(table, redundancy))
        except PlacementError as refused:
            outcomes.append(str(refused))
    assert outcomes[0] == outcomes[1]


# -- mirror ------------------------------------------------------------------------------------------------------------


@given(clusters, st.integers(2, 4), levels)
def test_a_mirror_is_refused_only_when_there_are_too_few_domains(
    labels: dict[int, Labels], copies: int, across: Level
) -> None:
    enough = len({domain(labels, rank, across) for rank in labels}) >= copies
    try:
        plan = place(labels, Redundancy.mirror(copies, across))
    except PlacementError:
        assert not enough
        return
    assert enough
    for rank in labels:
        holders = plan.holders(rank)
        assert holders[0] == rank
        assert len({domain(labels, holder, across) for holder in holders}) == len(holders) == copies
        assert all(rank in plan.keeps_for(holder) for holder in holders[1:])


@given(clusters, levels)
def test_the_copies_of_a_mirror_are_as_even_as_the_labels_allow(labels: dict[int, Labels], across: Level) -> None:
    """Two copies: the heaviest load is the least that any assignment has (Hall: owners of one domain share the rest)."""
    sizes: dict[str | int, int] = {}
    for rank in labels:
        sizes[domain(labels, rank, across)] = sizes.get(domain(labels, rank, across), 0) + 1
    assume(len(sizes) > 1)
    plan = place(labels, Redundancy.mirror(2, across))
    loads = [len(plan.keeps_for(rank)) for rank in labels]
    assert sum(loads) == len(labels)
    largest = max(sizes.values())
    assert max(loads) == max(1, -(-largest // (len(labels) - largest)))
    if 2 * largest <= len(labels):
        assert max(loads) - min(loads) <= 1


def test_mirrors_are_groups_inside_the_rack_so_most_pairs_of_trays_are_harmless() -> None:
    """The figure for GEMINI's group placement: 18 trays, 2 copies, 2 lost: 0.941."""
    plan = place(cluster([4] * 18), Redundancy.mirror(2, "tray"))
    assert plan.recoverable("tray", 2) == 1 - Fraction(9, 153)
    assert len({frozenset(plan.labels[holder].tray for holder in plan.holders(rank)) for rank in range(4)}) == 1


def test_the_nearest_level_that_protects_is_chosen() -> None:
    labels = cluster([2] * 4, [2] * 4)
    near = place(labels, Redundancy.mirror(2, "tray"))
    assert all(labels[a].rack == labels[b].rack for a in labels for b in near.holders(a))
    assert (near.tolerance("tray"), near.tolerance("rack")) == (1, 0)
    far = place(labels, Redundancy.mirror(2, "rack"))
    assert all(labels[a].rack != labels[b].rack for a in labels for b in far.holders(a)[1:])
    assert far.tolerance("rack") == 1


def test_a_lonely_tray_finds_its_holders_in_another_rack() -> None:
    labels = cluster([2, 2, 2], [1])
    plan = place(labels, Redundancy.mirror(2, "tray"))
    assert plan.survives({6})
    assert plan.tolerance("tray") == 1
    assert plan.kept() == 1


def test_where_groups_are_impossible_the_load_is_still_shared() -> None:
    labels = cluster([6, 2])
    plan = place(labels, Redundancy.mirror(2, "tray"))
    assert sorted(len(plan.keeps_for(rank)) for rank in labels) == [0, 0, 0, 0, 1, 1, 3, 3]
    assert plan.kept() == 3


@given(st.lists(st.integers(0, 4), min_size=2, max_size=7), st.data())
def test_holders_are_evened_out_to_the_optimum(domains: list[int], data: st.DataObject) -> None:
    site = Site(dict(enumerate(domains)), [])
    senders = data.draw(st.sets(st.sampled_from(range(len(domains)))))
    sends = assign_holders(site, {sender: {domains[sender]} for sender in sorted(senders)}, 2)
    choices = {s: [r for r in site.domain if domains[r] != domains[s]] for s in senders}
    if sends is None:
        assert any(not free for free in choices.values())
        return
    loads = [sum(holder in holders for holders in sends.values()) for holder in site.domain]
    # By Hall: some group of senders has only so many ranks to share.
    least = max(
        (
            -(-len(group) // len(set().union(*(choices[s] for s in group))))
            for k in range(1, len(senders) + 1)
            for group in combinations(senders, k)
        ),
        default=0,
    )
    assert max(loads) == least


# -- xor ---------------------------------------------------------------------------------------------------------------


@given(clusters, st.integers(2, 9), levels)
def test_sets_are_refused_only_when_one_domain_has_more_than_half_of_the_ranks(
    labels: dict[int, Labels], size: int, across: Level
) -> None:
    largest = max(
        sum(domain(labels, rank, across) == domain(labels, other, across) for other in labels) for rank in labels
    )
    try:
        plan = place(labels, Redundancy.xor(size, across))
    except PlacementError:
        assert 2 * largest > len(labels)
        return
    assert 2 * largest <= len(labels)
    assert sorted(rank for members in plan.sets for rank in members) == sorted(labels)
    for members in plan.sets:
        assert len(members) >= 2
        assert len({domain(labels, rank, across) for rank in members}) == len(members)


@pytest.mark.parametrize(
    ("trays", "sizes"), [(8, [8]), (15, [15]), (16, [8, 8]), (17, [9, 8]), (27, [9, 9, 9]), (5, [5])]
)
def test_remainders_are_spread_and_no_set_is_smaller_than_asked_for(trays: int, sizes: list[int]) -> None:
    plan = place(cluster([1] * trays), Redundancy.xor(8, "tray"))
    assert sorted(map(len, plan.sets), reverse=True) == sizes


@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=6), min_size=1, max_size=3), st.integers(2, 6))
def test_a_set_is_smaller_than_asked_for_only_for_want_of_domains(racks: list[list[int]], size: int) -> None:
    labels = cluster(*racks)
    largest = max(count for trays in racks for count in trays)
    assume(size * largest <= len(labels))
    assert min(map(len, place(labels, Redundancy.xor(size, "tray")).sets)) >= size


def test_sets_stay_in_a_rack_while_they_can_be_filled_there() -> None:
    labels = cluster([4] * 9, [4] * 9)
    plan = place(labels, Redundancy.xor(8, "tray"))
    assert all(len({labels[rank].rack for rank in members}) == 1 for members in plan.sets)
    wide = place(cluster([4] * 4, [4] * 4), Redundancy.xor(8, "tray"))
    assert [len(members) for members in wide.sets] == [8] * 4, "four trays cannot fill a set of 8: it spans the racks"


def test_the_rest_of_a_small_rack_joins_the_sets_of_others() -> None:
    plan = place(cluster([1] * 8, [1] * 8, [1]), Redundancy.xor(8, "tray"))
    assert sorted(map(len, plan.sets)) == [8, 9]
    assert plan.tolerance("tray") == 1


def test_nearness_gives_way_before_protection_does() -> None:
    """Rack 0 alone could make sets of its own, and would leave rack 1's only tray with nobody."""
    labels = cluster([1, 1], [2])
    plan = place(labels, Redundancy.xor(2, "tray"))
    assert all(len({labels[rank].rack for rank in members}) == 2 for members in plan.sets)


def test_two_trays_meet_in_all_of_their_sets_or_in_none() -> None:
    labels = cluster([4] * 18)
    plan = place(labels, Redundancy.xor(8, "tray"))
    trays = [frozenset(labels[rank].tray for rank in members) for members in plan.sets]
    assert len(set(trays)) == 2
    assert plan.recoverable("tray", 2) == Fraction(81, 153)


@pytest.mark.parametrize(("data", "parity"), [(2, 2), (8, 2), (1, 3), (7, 1)])
def test_any_so_many_trays_may_be_lost_as_a_set_has_parities(data: int, parity: int) -> None:
    plan = place(cluster([2] * (data + parity)), Redundancy.rs(data, parity, "tray"))
    assert [len(members) for members in plan.sets] == [data + parity] * 2
    assert plan.tolerance("tray") == parity
    assert plan.kept() == Fraction(parity, data)
    for lost in combinations(range(len(plan.labels)), parity + 1):
        assert plan.survives(set(lost)) == all(len({*lost} & {*members}) <= parity for members in plan.sets)


@given(small, st.integers(1, 4), st.integers(1, 3), levels)
def test_the_tolerance_of_sets_is_that_of_all_losses(
    labels: dict[int, Labels], data: int, parity: int, across: Level
) -> None:
    try:
        plan = place(labels, Redundancy.rs(data, parity, across))
    except PlacementError:
        assume(False)
    for level in ("process", "tray", "rack"):
        domains = {domain(labels, rank, level) for rank in labels}
        fatal = [
            len(gone)
            for gone in losses(domains, len(domains))  # type: ignore[arg-type]
            if not plan.survives({rank for rank in labels if domain(labels, rank, level) in gone})
        ]
        assert plan.tolerance(level) == min(fatal, default=len(domains) + 1) - 1


def test_form_sets_without_ranks_forms_none() -> None:
    assert form_sets(Site({}, []), [], 2, 2) == []


# -- copies that data parallelism provides -----------------------------------------------------------------------------


@pytest.mark.parametrize("redundancy", [Redundancy.mirror(2, "tray"), Redundancy.xor(8, "tray")])
def test_plain_data_parallelism_over_trays_costs_nothing(redundancy: Redundancy) -> None:
    plan = place(cluster([4, 4]), redundancy, dict.fromkeys(range(8), "model"))
    assert plan.sends == {}
    assert plan.sets == ()
    assert plan.kept() == 0
    assert plan.tolerance("tray") == 1
    assert "data parallelism has all the copies already" in plan.statement()
    assert plan.holders(5) == tuple(range(8))


def test_a_replica_in_the_same_tray_is_no_copy() -> None:
    """Two replicas of each of two shards, both in one tray: each shard sends one copy, not two."""
    plan = place(
        cluster([4], [4]),
        Redundancy.mirror(2, "tray"),
        {0: "a", 1: "a", 2: "b", 3: "b"} | dict.fromkeys((4, 5, 6, 7), "c"),
    )
    assert set(plan.sends) == {0, 2, 4}
    assert plan.tolerance("tray") == 1
    assert plan.holders(1)[:2] == (0, 1)


def test_shards_that_need_nothing_become_members_when_the_others_need_them() -> None:
    labels = cluster([2, 1, 1])
    plan = place(labels, Redundancy.xor(2, "tray"), {0: "x", 1: "y", 2: "z", 3: "z"})
    assert sorted(rank for members in plan.sets for rank in members) == [0, 1, 2, 3]
    assert plan.tolerance("tray") == 1
    assert plan.set_of(0) is not None


def test_a_third_copy_is_added_to_two_that_exist() -> None:
    plan = place(cluster([2], [2], [2]), Redundancy.mirror(3, "rack"), {0: "a", 2: "a", 1: "b", 3: "b", 4: "c", 5: "c"})
    assert plan.tolerance("rack") == 2
    assert len(plan.sends[0]) == 1
    assert len(plan.sends[4]) == 2


# -- labels, refusals, statements --------------------------------------------------------------------------------------


def test_local_keeps_nothing_for_anyone() -> None:
    plan = place(cluster([2, 2]), Redundancy.local())
    assert plan.kept() == 0
    assert plan.tolerance("process") == 0
    assert plan.survives(set())
    assert not plan.survives({3})
    assert plan.set_of(3) is None


def test_an_unknown_process_is_the_ranks_own_and_other_unknown_labels_are_refused() -> None:
    bare = {rank: Labels() for rank in range(4)}
    assert place(bare, Redundancy.mirror(2, "process")).tolerance("process") == 1
    with pytest.raises(PlacementError, match=r"needs the tray of every rank; it is not known of rank 0 and 3 more"):
        place(bare, Redundancy.mirror(2, "tray"))
    assert place(bare, Redundancy.mirror(2, "process")).tolerance("rack") is None


def test_ranks_of_one_process_fail_together() -> None:
    labels = {rank: Labels(process=f"p{rank // 2}") for rank in range(4)}
    plan = place(labels, Redundancy.mirror(2, "process"))
    assert plan.survives({0, 1})
    assert plan.tolerance("process") == 1


def test_power_may_cut_across_racks() -> None:
    labels = {r: Labels(rack=f"r{r // 4}", tray=f"t{r}", power=f"feed-{r % 2}") for r in range(8)}
    plan = place(labels, Redundancy.xor(2, "power"))
    assert plan.tolerance("power") == 1


def test_one_tray_is_refused_with_a_remedy() -> None:
    with pytest.raises(PlacementError, match=r"8 ranks on 1 tray\(s\) \(r0/t0: 8\).*Remedy: .*process, tray, rack"):
        place(cluster([8]), Redundancy.mirror(2, "tray"))
    with pytest.raises(PlacementError, match=r'xor\(set_size=8, across="tray"\) is impossible'):
        place(cluster([3, 1, 1]), Redundancy.xor(8, "tray"))


def test_of_many_domains_those_with_the_most_ranks_are_named() -> None:
    with pytest.raises(
        PlacementError, match=r"45 ranks on 6 tray\(s\) \(r0/t1: 30, r0/t5: 5, r0/t4: 4, r0/t2: 3, \.\.\.\)"
    ):
        place(cluster([1, 30, 3, 2, 4, 5]), Redundancy.xor(8, "tray"))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Redundancy.mirror(1),
        lambda: Redundancy.xor(1),
        lambda: Redundancy.xor(8, "shelf"),  # type: ignore[arg-type]
        lambda: Redundancy.rs(0, 2),
        lambda: Redundancy.rs(2, 0),
        lambda: Redundancy.rs(200, 20),
    ],
)
def test_terms_that_mean_nothing_are_refused(make: object) -> None:
    with pytest.raises(PlacementError, match="Remedy"):
        make()  # type: ignore[operator]


def test_ranks_that_are_not_in_the_table_are_refused() -> None:
    plan = place(cluster([1, 1]), Redundancy.mirror(2, "tray"))
    with pytest.raises(PlacementError, match=r"no such ranks: \[7\]"):
        plan.survives({0, 7})
    with pytest.raises(PlacementError, match="no such rank: 7"):
        plan.holders(7)


def test_the_statement_says_what_is_survived_and_what_it_costs() -> None:
    assert place(cluster([4] * 18), Redundancy.xor(8, "tray")).statement() == (
        'xor(set_size=8, across="tray"): 72 ranks, 72 shards, 8 sets of 9\n'
        "  process  survives any 1 lost, and 88.7% of the losses of 2\n"
        "  tray     survives any 1 lost, and 52.9% of the losses of 2\n"
        "  rack     a single loss can be fatal\n"
        "  memory   12.5% of a shard more on a rank, for each slot\n"
        "  traffic  a rank sends up to 1 shard(s) a checkpoint, 100% of it inside a rack"
    )


def test_an_empty_table_has_an_empty_plan() -> None:
    for redundancy in (Redundancy.local(), Redundancy.mirror(), Redundancy.xor()):
        plan = place({}, redundancy)
        assert plan.survives(set())
        assert plan.statement()


def test_levels_go_from_near_to_far() -> None:
    assert LEVELS == ("process", "gpu", "tray", "rack", "power")
