"""Where attempts were abandoned, and where the next one is compared with them."""

from __future__ import annotations

from rackrun.worker.steps.undo.abandoned_places import AbandonedPlaces


def left_at(count: int) -> AbandonedPlaces:
    places = AbandonedPlaces()
    places.begin(())
    for _ in range(count):
        assert not places.reach(updates_next=False), "nothing was abandoned before"
    places.leave()
    places.begin(())
    return places


def test_an_attempt_is_compared_where_the_one_before_was_left_and_at_the_place_behind() -> None:
    places = left_at(2)
    assert places
    assert [places.reach(updates_next=False) for _ in range(4)] == [False, True, True, False]


def test_right_before_an_update_the_comparison_is_done_there_once() -> None:
    places = left_at(2)
    assert not places.reach(updates_next=False)
    assert not places.reach(updates_next=True)
    assert places.is_due_before_update()
    assert not places.reach(updates_next=True)
    assert places.is_due_before_update()
    assert not places.is_due_before_update(), "it has come further than the one before"


def test_an_attempt_that_updates_before_it_comes_to_that_place_is_compared_then() -> None:
    places = left_at(3)
    assert not places.reach(updates_next=False)
    assert places.is_due_before_update()


def test_with_other_micro_batches_it_is_compared_at_every_place() -> None:
    places = left_at(2)
    places.begin((0.5,))
    assert all(places.reach(updates_next=False) for _ in range(5))
    places.clear()
    assert not places
    assert not places.reach(updates_next=False)


def test_other_micro_batches_alone_make_nothing_suspect() -> None:
    places = AbandonedPlaces()
    places.begin((0.5,))
    assert not places.reach(updates_next=True)
    assert not places.is_due_before_update()
