"""Signals that a scheduler sends to every process of a job: a worker leaves them to its agent."""

from __future__ import annotations

import signal

from tests.agent.conftest import Rig

SIGNALLED = """
    import os, signal, subprocess, sys
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(os.getpid(), number)
    child = subprocess.Popen(["sleep", "600"])
    child.terminate()
    ready, begun = os.pipe()
    forked = os.fork()
    if forked == 0:
        os.write(begun, b"!")
        signal.pause()
        os._exit(0)
    os.read(ready, 1)
    os.kill(forked, signal.SIGTERM)
    print(f"children={child.wait()},{os.waitpid(forked, 0)[1]}", flush=True)
    heard = []
    signal.signal(signal.SIGUSR1, lambda *_: heard.append("mine"))
    os.kill(os.getpid(), signal.SIGUSR1)
    print(f"heard={heard}", flush=True)
"""


async def test_a_worker_goes_on_and_its_children_and_its_own_handlers_are_as_ever(rig: Rig) -> None:
    await rig.start(SIGNALLED)
    await rig.start_worker()
    await rig.line(f"children={-signal.SIGTERM},{int(signal.SIGTERM)}")
    await rig.line("heard=['mine']")
    exited = await rig.coordinator.exit_of(1)
    assert (exited.exit_code, exited.signal) == (0, None)


async def test_what_the_agent_says_ends_a_worker_at_once(rig: Rig) -> None:
    """Not by a SIGKILL after the grace time."""
    await rig.start(
        """
        import os, signal
        os.kill(os.getpid(), signal.SIGTERM)
        print(f"pid={os.getpid()}", flush=True)
        while True:
            signal.pause()
        """
    )
    await rig.start_worker()
    await rig.number("pid")
    await rig.end()
    exited = await rig.coordinator.exit_of(1)
    assert exited.signal == signal.SIGTERM
