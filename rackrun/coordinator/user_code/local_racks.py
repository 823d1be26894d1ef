"""``--provider local``: simulated racks whose agents run on this host and end with the provider's process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from rackrun.coordinator.user_code.provider_api import RackRequest, Refused

__all__ = ["LocalRacks", "local"]

_START_S = 5.0
"""Seconds that a new interpreter needs to import torch."""
_LEAVES_S = 5.0
"""Seconds within which agents exit by themselves at the end of a job."""


def local(arguments: str = "") -> LocalRacks:
    """Parse ``racks=1,after=0,trays=..,slots=..`` and return the provider. Raises ValueError.

    ``racks``: number of racks at a time. ``after``: seconds from a request until its rack comes. ``trays``, ``slots``:
    size of the racks, if it should differ from what is requested.
    """
    said: dict[str, float] = {"racks": 1, "after": 0}
    for word in filter(None, (part.strip() for part in arguments.split(","))):
        name, _, value = word.partition("=")
        if name not in ("racks", "after", "trays", "slots"):
            raise ValueError(f"{word!r} is none of racks=N, after=SECONDS, trays=N, slots=N")
        said[name] = float(value) if name == "after" else int(value)
        if not 0 <= said[name] < 1e6 or (name in ("trays", "slots") and said[name] < 1):
            raise ValueError(f"{word!r} is out of range")
    trays, slots = (int(said[name]) if name in said else None for name in ("trays", "slots"))
    return LocalRacks(int(said["racks"]), said["after"], trays, slots)


class LocalRacks:
    """The provider of simulated racks."""

    def __init__(
        self, racks: int = 1, after_s: float = 0.0, trays: int | None = None, slots: int | None = None
    ) -> None:
        self.expected_s = after_s + _START_S
        self._racks, self._after_s, self._trays, self._slots = racks, after_s, trays, slots
        self._agents: dict[str, list[subprocess.Popen[bytes]]] = {}
        # A process dies with the thread that started it, so one thread starts them all, and stays.
        self._starter = ThreadPoolExecutor(1)

    def request_rack(self, request: RackRequest) -> Sequence[str]:
        """Start a rack's agents here, and return the names of its trays. Raises `Refused`."""
        if request.cancelled.wait(self._after_s):
            raise Refused("it was cancelled")
        return self._starter.submit(self._start, request).result()

    def _start(self, request: RackRequest) -> Sequence[str]:
        if len(self._agents) >= self._racks:
            raise Refused(f"all simulated racks are in use ({self._racks})")
        names = [f"rack-{request.number}-{index:02}" for index in range(self._trays or request.trays)]
        agents = self._agents[request.name] = []
        for name in names:
            config = request.agent_config(name, slots=self._slots, simulated=True)
            agents.append(
                _spawn(config, request.console)
            )  # one by one: if one cannot be started, the others are released
        return names

    def close(self) -> None:
        """End the thread that starts agents, for a process that continues without the provider."""
        self._starter.shutdown()

    def release(self, name: str) -> None:
        """Wait a while for the rack's agents to end, and kill those that have not."""
        agents = self._starter.submit(self._agents.get, name, []).result()
        deadline = time.monotonic() + _LEAVES_S
        for agent in agents:
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(max(deadline - time.monotonic(), 0.0))
            agent.kill()
            agent.wait()
        self._starter.submit(self._agents.pop, name, None).result()


def _spawn(config: bytes, console: int) -> subprocess.Popen[bytes]:
    fd = os.memfd_create("rackrun-agent-config", 0)
    try:
        os.write(fd, config)
        os.lseek(fd, 0, os.SEEK_SET)
        return subprocess.Popen(
            [sys.executable, "-m", "rackrun.agent", f"fd:{fd}", "--parent", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=console,
            pass_fds=(fd,),
            start_new_session=True,
        )
    finally:
        os.close(fd)
