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


def test_a_wait_that_was_left_says_nothing_of_the_next() -> None:
    waits = Waits()
    waits.took(0.5)
    asked = iter([False, True])
    assert not wait_until(lambda: False, lambda: next(asked), waits)
    assert waits.nap_s(0.5) == 0.0


def test_what_has_passed_is_not_awaited() -> None:
    assert wait_until(lambda: True, lambda: True)
