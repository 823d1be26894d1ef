"""What a filler may do; by the slot it runs beside. Each writes ``ready-SLOT-INCARNATION`` once it does it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path


def polite() -> None:
    """Goes when it is told."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


def deaf() -> None:
    """Ignores SIGTERM, and computes, in several threads."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for _ in range(2):
        threading.Thread(target=spin, daemon=True).start()


def many() -> None:
    """Has children of every kind: in its group, in sessions of their own."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for number in range(6):
        if os.fork() == 0:
            if number % 2:
                os.setsid()
            time.sleep(600)


def daemon() -> None:
    """Has a grandchild whose parent is gone, in a session of its own, without our mark and deaf."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() != 0:
            os._exit(0)
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        os.execve(sys.executable, [sys.executable, "-c", code, DAEMON, sys.argv[1]], {})
    os.wait()


def runner() -> None:
    """Is never the same process for long."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        while True:
            os.setsid()
            if os.fork() != 0:
                os._exit(0)


def hog() -> None:
    """Holds memory."""
    global held  # noqa: PLW0603
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    held = bytearray(b"x") * (128 << 20)


def stopper() -> None:
    """Stops its cage, again and again."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    cage = os.getppid()
    if os.fork() == 0:
        while True:
            os.kill(cage, signal.SIGSTOP)
            time.sleep(0.001)


def killer() -> None:
    """Kills its cage as soon as it may go, and has a daemon without our mark by then."""
    cage = os.getppid()
    signal.signal(signal.SIGTERM, lambda *_: os.kill(cage, signal.SIGKILL))
    daemon()


def spin() -> None:
    number = 0
    while True:
        number += 1


held = bytearray()
KINDS: tuple[Callable[[], None], ...] = (polite, daemon, many, stopper, hog, killer, runner, deaf)

DAEMON = "a-daemon-of-a-filler"

if __name__ == "__main__":
    slot, incarnation, _ = os.environ["RACKRUN_FILLER"].split(":")
    index = int(slot.rpartition("/")[2])
    KINDS[index]()
    Path(sys.argv[1], f"ready-{index}-{incarnation}").write_text(str(os.getpid()))
    while True:
        time.sleep(600)
