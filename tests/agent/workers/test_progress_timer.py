"""Whether a worker without progress works or hangs, from what is read of its process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from rackrun.agent.workers.hang_detector import ActivityTotals, AgentPauses, ProgressTimer, starved_ns, works
from rackrun.agent.workers.process_activity import frozen, read_signs, where_in_kernel

S = 1_000_000_000
IDLE, BUSY = 3 * S, 30 * S


def signs(
    at: float, *, cpu: float = 0.0, ran: float = 0.0, waited: float = 0.0, io: int = 0, wakes: int = 0
) -> ActivityTotals:
    return ActivityTotals(int(at * S), int(cpu * S), {1: (int(ran * S), int(waited * S))}, io, wakes)


def watched(*seen: ActivityTotals) -> ProgressTimer:
    patience = ProgressTimer()
    patience.restart(0, 0)
    for one in seen:
        patience.add_reading(one)
    return patience


def overdue(patience: ProgressTimer, at: float, busy: int = BUSY, held: float = 0.0) -> bool:
    return patience.overdue(int(at * S), int(held * S), IDLE, busy)


def test_time_for_which_the_agent_did_not_run_is_nobodys() -> None:
    """Progress from just before it, which the agent sees only after it, is not old."""
    held = AgentPauses()
    held.add(10, 30)
    patience = ProgressTimer()
    patience.restart(9, held.by(9))
    assert patience.quiet_ns(31, held.total_ns) == 2
    patience.restart(20, held.by(20))
    assert patience.quiet_ns(31, held.total_ns) == 1, "it ran while the agent did not, and then it may not have"
    patience.restart(31, held.by(31))
    assert patience.quiet_ns(40, held.total_ns) == 9


def test_an_agent_that_is_held_up_again_and_again_was_held_up_all_the_time() -> None:
    held = AgentPauses()
    for start in (10, 30, 50):
        held.add(start, start + 20)
    assert [held.by(at) for at in (9, 10, 35, 70, 80)] == [0, 0, 25, 60, 60]
    held.add(100, 110)
    assert [held.by(at) for at in (80, 105, 110)] == [60, 65, 70]


def test_who_shows_no_sign_of_life_is_overdue_when_its_time_is() -> None:
    patience = watched(signs(1.5), signs(2.9))
    assert not overdue(patience, 2.9)
    assert overdue(patience, 3.1)


@pytest.mark.parametrize(
    "later",
    [
        signs(2.5, cpu=0.1),
        signs(2.5, io=4 << 20),
        signs(2.5, wakes=20),
        signs(2.5, ran=0.05, waited=0.9),
    ],
    ids=["computes", "writes", "wakes", "gets no processor"],
)
def test_who_works_has_longer_outside_of_steps_but_not_for_ever(later: ActivityTotals) -> None:
    patience = watched(signs(1.5), later)
    assert not overdue(patience, 5.0)
    assert overdue(patience, 5.6 + 0.9), "it stopped working at 2.5 s"
    for at in range(3, 40):
        patience.add_reading(later._replace(at_ns=at * S, cpu_ns=at * S))
    assert overdue(patience, 39.0)


def test_a_main_thread_that_spins_does_not_work() -> None:
    before = signs(1.5, cpu=1.5, ran=1.5)._replace(main=1, spins=(1, int(1.4 * S)))
    spins = signs(2.5, cpu=2.5, ran=2.5)._replace(main=1, spins=(1, int(2.4 * S)))
    assert not works(before, spins)
    assert not works(before, spins._replace(wakes=20)), "it hands the interpreter's lock to those that look at it"
    assert works(before, spins._replace(others_ns=int(0.2 * S))), "another thread works"
    assert works(before, spins._replace(spins=(int(1.6 * S), int(2.4 * S)))), "it did not spin all the time"
    assert works(before, spins._replace(spins=(1, int(1.4 * S)))), "nobody has looked since"


def test_a_main_thread_that_spins_needs_no_processor() -> None:
    before = signs(1.5)._replace(main=1, spins=(1, int(1.4 * S)))
    now = signs(2.5, ran=0.1, waited=0.9)._replace(main=1, spins=(1, int(2.4 * S)))
    assert starved_ns(before, now) == 0
    assert starved_ns(before, now._replace(spins=(0, int(2.4 * S)))) == int(0.9 * S)


@pytest.mark.parametrize(
    "later",
    [
        signs(2.5, wakes=1),
        signs(2.5, io=8 << 10),
        signs(2.5)._replace(waits_ns={1: (0, 0), 2: (int(0.03 * S), 0)}),
    ],
    ids=["polls once a second", "a slow upload", "another thread runs a little"],
)
def test_who_is_compared_with_others_shows_no_sign_of_life_at_all(later: ActivityTotals) -> None:
    before = signs(1.5)._replace(main=1, waits_ns={1: (0, 0), 2: (0, 0)})
    patience = watched(before, later._replace(main=1))
    assert not works(before, later)
    assert patience.idle_ns(4 * S, 0) == 4 * S
    assert patience.lifeless_ns(4 * S, 0) == int(1.5 * S)
    assert watched(before, before._replace(at_ns=int(2.5 * S))).lifeless_ns(4 * S, 0) == 4 * S


def test_who_spins_shows_none_either() -> None:
    before = signs(1.5, cpu=1.5, ran=1.5)._replace(main=1, spins=(1, int(1.4 * S)))
    spins = signs(2.5, cpu=2.5, ran=2.5, wakes=12)._replace(main=1, spins=(1, int(2.4 * S)))
    assert watched(before, spins).lifeless_ns(4 * S, 0) == 4 * S


def test_in_a_step_work_is_no_excuse_but_a_lack_of_processors_is() -> None:
    assert overdue(watched(signs(1.5), signs(3.1, cpu=1.6)), 3.1, busy=0)
    starved = watched(signs(1.5), signs(3.1, ran=0.2, waited=1.4))
    assert not overdue(starved, 3.1, busy=0)
    assert overdue(starved, 4.6, busy=0)


def test_threads_that_only_wake_are_not_starved() -> None:
    assert starved_ns(signs(0), signs(1, ran=0.001, waited=0.5)) == 0
    assert not works(signs(0), signs(1, ran=0.001, waited=0.5))


def test_threads_that_tick_beside_busy_programs_are_not_starved() -> None:
    assert starved_ns(signs(0), signs(1, ran=0.003, waited=0.06)) == 0


def test_time_for_which_the_agent_itself_was_held_up_does_not_count() -> None:
    assert not overdue(watched(), 5.0, held=2.5)
    assert overdue(watched(), 6.0, held=2.5)


def test_what_is_told_is_told_again_only_when_the_time_is_over_once_more() -> None:
    patience = watched()
    assert overdue(patience, 4.0)
    patience.mark_reported(4 * S, 0)
    assert not overdue(patience, 6.9)
    assert overdue(patience, 7.1)


@pytest.mark.parametrize(
    ("code", "busy"),
    [
        ("import time; time.sleep(600)", False),
        ("while True: pass", True),
        ("import subprocess; subprocess.run(['sh', '-c', 'while :; do :; done'])", True),
    ],
    ids=["sleeps", "loops", "a child works"],
)
def test_a_real_process_is_read(code: str, busy: bool) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", f"print('up', flush=True)\n{code}"], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    try:
        process.stdout.readline()
        while next_window(process.pid) is not busy:  # what comes before the sleep ends some time; what works never does
            pass
        assert where_in_kernel(process.pid)
        assert not frozen(process.pid)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def next_window(pid: int) -> bool:
    """Whether it works, over the next third of a second."""
    before = now = read_signs(pid)
    while now.at_ns - before.at_ns < 300_000_000:
        threading.Event().wait(0.05)
        now = read_signs(pid)
    return works(before, now)
