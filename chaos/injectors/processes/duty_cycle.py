"""Let processes run for only a share of the time, by stopping and waking them in short turns.

Run as ``python -m rackrun.chaos.injectors.processes.duty_cycle SHARE PID:STARTED...``. It begins when a line comes on
its standard input; when the input ends, it wakes all processes and exits.
"""

from __future__ import annotations

import select
import signal
import sys
import time

from rackrun.chaos.testbed.machine.processes import Process

__all__: list[str] = []

PERIOD_S = 0.05


def main() -> int:
    """Stop and wake the processes in turns until the standard input ends."""
    share = float(sys.argv[1])
    processes = [Process(*map(int, text.split(":"))) for text in sys.argv[2:]]
    if not sys.stdin.buffer.readline():
        return 0
    told = False
    try:
        while any([process.send(signal.SIGSTOP) for process in processes]):  # noqa: C419 - all of them, not up to the first
            if not told:
                sys.stdout.write("stopped\n")
                sys.stdout.flush()
                told = True
            time.sleep((1 - share) * PERIOD_S)
            for process in processes:
                process.send(signal.SIGCONT)
            if select.select([sys.stdin], [], [], share * PERIOD_S)[0]:
                break
    finally:
        for process in processes:
            process.send(signal.SIGCONT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
