"""An agent's descriptors do not grow with what its workers go through."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from rackrun.protocol.ids import Generation
from tests.agent.conftest import Rig, eventually

pytestmark = pytest.mark.slow


def descriptors(pid: int) -> Counter[str]:
    """What they lead to -> how many."""
    found: Counter[str] = Counter()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except FileNotFoundError:
            continue
        kind = target.partition(":[")[0]
        found[kind.rstrip("0123456789") if kind.startswith("/memfd") else kind] += 1
    return found


async def test_twenty_recoveries_leave_the_agent_as_many_descriptors_as_one(rig: Rig, tmp_path: Path) -> None:
    """Each of them a new generation, with a new store, and a new worker in the slot of one that is lost."""
    born = tmp_path / "born"
    born.mkdir()
    await rig.start(f"import os, time; open(f'{born}/{{os.getpid()}}', 'w').close(); time.sleep(600)")
    for incarnation in range(1, 24):
        await rig.start_worker(0, incarnation, generation=Generation(incarnation))
        # A worker that is fenced before its process exists is over at once, and the agent may not even be set up.
        await rig.eventually(lambda: len(os.listdir(born)) == incarnation, "a worker")  # noqa: B023
        await rig.fence(0, incarnation)
        await rig.coordinator.exit_of(incarnation)
        if incarnation == 3:
            first = descriptors(rig.agent)

    def grown() -> Counter[str]:
        return descriptors(rig.agent) - first

    # A worker's exit is told before its descriptors are closed: what is left of the last one goes too.
    await eventually(lambda: descriptors(rig.agent).total() <= first.total() + 2, lambda: f"fewer: {grown()}")
    await rig.end()
