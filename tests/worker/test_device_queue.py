"""How long the host sleeps while it waits for a device, without a device."""

from __future__ import annotations

from rackrun.worker.device_queue import Waits, wait_until


def test_a_short_wait_is_without_a_nap() -> None:
    assert Waits().nap_s(0.001) == 0.0


def test_the_first_long_wait_is_in_naps() -> None:
    assert Waits().nap_s(0.01) > 0.0


def test_the_end_of_a_wait_as_long_as_the_last_is_awaited_without_a_nap() -> None:
    waits = Waits()
    waits.took(0.080)
    assert waits.nap_s(0.040) > 0.0
    assert waits.nap_s(0.079) == 0.0
    assert waits.nap_s(0.081) == 0.0
    assert waits.nap_s(0.090) > 0.0  # this one is longer than the last


def test_where_waits_differ_the_end_is_awaited_from_the_shortest_to_the_longest() -> None:
    waits = Waits()
    for waited_s in (0.050, 0.040, 0.060):
        waits.took(waited_s)
    assert waits.nap_s(0.037) > 0.0
    assert [waits.nap_s(at) for at in (0.039, 0.045, 0.055, 0.061)] == [0.0] * 4
    assert waits.nap_s(0.063) > 0.0


def test_a_long_wait_is_forgotten() -> None:
    waits = Waits()
    waits.took(9.0)
    for _ in range(8):
        waits.took(0.010)
    assert waits.nap_s(0.100) > 0.0


def test_a_wait_that_was_left_says_nothing_of_the_next() -> None:
    waits = Waits()
    waits.took(0.5)
    asked = iter([False, True])
    assert not wait_until(lambda: False, lambda: next(asked), waits)
    assert waits.nap_s(0.5) == 0.0


def test_what_has_passed_is_not_awaited() -> None:
    assert wait_until(lambda: True, lambda: True)
