"""Start and control the proxy between the agents and the coordinator (`rackrun.chaos.testbed.network.link_proxy`)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import msgspec

from rackrun.chaos.testbed.network.hosts import HEAD, PORT, Hosts
from rackrun.chaos.testbed.network.link_proxy import LinkOrder, Ports, StrikeMet

__all__ = ["Links"]


class Links:
    """The proxy of one job, through which every connection from a tray's host to the coordinator's port goes.

    Raises OSError when it cannot be started.
    """

    def __init__(self, hosts: Hosts, env: dict[str, str]) -> None:
        words = [
            sys.executable,
            "-m",
            "rackrun.chaos.testbed.network.link_proxy",
            hosts[HEAD].address,
            str(PORT),
            *hosts.trays,
        ]
        self._process = subprocess.Popen(
            hosts.command(HEAD, words, sys.executable),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=env,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise ChildProcessError("nobody stands between the agents and the coordinator: the proxy has not started")
        ports = msgspec.json.decode(line, type=Ports).ports
        rules = "".join(
            f"ip saddr {hosts[tray].address} tcp dport {PORT} redirect to :{port}\n" for tray, port in ports.items()
        )
        hosts.filter(
            hosts.named(HEAD),
            f"table ip links {{\nchain in {{ type nat hook prerouting priority -100; policy accept;\n{rules}}}\n}}\n",
        )
        os.set_blocking(self._process.stdout.fileno(), False)
        self._unread = b""
        self._effects: dict[tuple[int, str], str] = {}

    def say(self, say: LinkOrder) -> None:
        """Send an order to the proxy."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(say) + b"\n")
        self._process.stdin.flush()

    def effect(self, strike: int, tray: str) -> str:
        """Return how the strike has met the tray's connections; "" if it has not yet."""
        assert self._process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._process.stdout.fileno(), 1 << 16):
                self._unread += data
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            effect = msgspec.json.decode(line, type=StrikeMet)
            self._effects[effect.strike, effect.tray] = effect.detail
        return self._effects.get((strike, tray), "")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
