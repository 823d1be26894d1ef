"""A provider of racks of one's own: a shelf of hosts that can be reached with ssh, and whose file system is ours.

    rackrun --nnodes 4 --rdzv-endpoint head:29400 --rdzv-id job7 --token-file job7.token ... \\
            --provider examples.provider:shelf:node20,node21 train.py

Each host is a rack of one tray. Nothing here needs torch.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from rackrun.provider import RackRequest, Refused

START = ("ssh", "-tt", "-o", "BatchMode=yes", "{host}", "python -m rackrun.agent {config}")  # -tt: it ends with its ssh


def shelf(hosts: str) -> Shelf:
    return Shelf(hosts.split(","))


class Shelf:
    expected_s = 20.0

    def __init__(self, hosts: Sequence[str], folder: Path | None = None) -> None:
        self._hosts = hosts
        self._folder = folder or Path.home()
        self._taken: dict[str, dict[str, subprocess.Popen[bytes]]] = {}
        self._ours = threading.Lock()  # calls come in threads of their own

    def request_rack(self, request: RackRequest) -> Sequence[str]:
        with self._ours:
            taken = [host for of in self._taken.values() for host in of]
            free = [host for host in self._hosts if host not in taken]
            if len(free) < request.trays:
                raise Refused(f"{len(free)} of {len(self._hosts)} hosts are free, {request.trays} are wanted")
            agents = self._taken[request.name] = {}
            for host in free[: request.trays]:
                agents[host] = self._start(host, request)  # what fails is released, with those before it
            return list(agents)

    def release(self, name: str) -> None:
        with self._ours:
            for agent in self._taken.pop(name, {}).values():
                agent.terminate()
                agent.wait()
        for config in self._folder.glob(f"{name}.*.json"):
            config.unlink()

    def _start(self, host: str, request: RackRequest) -> subprocess.Popen[bytes]:
        config = self._folder / f"{request.name}.{host}.json"
        config.touch(mode=0o600)
        config.write_bytes(request.agent_config(host, advertise=host))
        return subprocess.Popen([word.format(host=host, config=config) for word in START], stdin=subprocess.DEVNULL)
