"""How long the host sleeps while it waits for a device, without a device."""

from __future__ import annotations

import threading
import time

from rackrun.worker.device.device_queue import Waits, wait_until


def test_a_short_wait_is_without_a_nap() -> None:
    assert Waits().nap_s(0.001) == 0.0


def test_the_first_long_wait_is_in_naps() -> None:
    assert Waits().nap_s(0.01) > 0.0


def test_the_end_of_a_wait_as_long_as_the_last_is_awaited_without_a_nap() -> None:
    waits = Waits()
    waits.record(0.080)
    assert waits.nap_s(0.040) > 0.0
    assert waits.nap_s(0.079) == 0.0
    assert waits.nap_s(0.081) == 0.0
    assert waits.nap_s(0.090) > 0.0  # this one is longer than the last


def test_where_waits_differ_the_end_is_awaited_from_the_shortest_to_the_longest() -> None:
    waits = Waits()
    for waited_s in (0.050, 0.040, 0.060, 9.0):  # the longest is no measure
        waits.record(waited_s)
    assert waits.nap_s(0.037) > 0.0
    assert [waits.nap_s(at) for at in (0.039, 0.045, 0.055, 0.061)] == [0.0] * 4
    assert waits.nap_s(0.063) > 0.0


def test_a_long_wait_is_forgotten() -> None:
    waits = Waits()
    waits.record(9.0)
    waits.record(9.0)
    for _ in range(7):
        waits.record(0.010)
    assert waits.nap_s(0.100) > 0.0


def test_a_wait_that_was_left_says_nothing_of_the_next() -> None:
    waits = Waits()
    waits.record(0.5)
    asked = iter([False, True])
    assert not wait_until(lambda: False, lambda: next(asked), waits)
    assert waits.nap_s(0.5) == 0.0


def test_two_threads_may_wait_at_once() -> None:
    ends, failed, eager = time.monotonic() + 0.05, list[BaseException](), Waits()
    for waited_s in (0.001, 0.06, 0.06):
        eager.record(waited_s)

    def wait() -> None:
        try:
            wait_until(lambda: time.monotonic() > ends, lambda: False, eager)
        except BaseException as error:  # noqa: BLE001 - looked at below
            failed.append(error)

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_what_has_passed_is_not_awaited() -> None:
    assert wait_until(lambda: True, lambda: True)
