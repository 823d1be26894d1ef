"""Make hosts for the trays of one job on this machine: network namespaces on a switch, which has its own namespace.

::

    switch   a bridge; every frame between two hosts passes it, so frames are dropped there
    head     10.77.0.1   the coordinator, and the proxy before it (`rackrun.chaos.testbed.network.link_proxy`)
    tray-00  10.77.1.1   an agent and its workers; the launcher of tray-00 is the coordinator's, on head
    tray-01  10.77.1.2   a launcher, an agent, workers

Nothing is added to the machine's own network. A namespace ends with its last process and its name under /run/netns.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from rackrun.chaos.base.errors import Unsupported
from rackrun.chaos.testbed.machine.undo_log import NAMED, RemoveHosts, UndoLog
from rackrun.chaos.testbed.network.enter_host import NamespaceHost, visit

__all__ = ["HEAD", "PORT", "Hosts", "HostSpread", "hosts_here", "left_of"]

HEAD, _SWITCH, _BRIDGE = "head", "switch", "bridge"
PORT = 29400
TRAYS_MAX = 100
_SETTLE_S = 10.0
_TOOLS = {"ip": "iproute2", "nft": "nftables"}
_TRY = """\
ip link add name a type veth peer name b && ip link add name c type bridge && nft -f - <<'EOF'
table bridge t {
  counter n {}
  chain c { type filter hook forward priority 0; iifname "a" numgen random mod 100 < 50 counter name "n" drop; }
}
table inet t { chain c { type filter hook output priority 0; meta l4proto tcp reject with tcp reset; }; }
table ip t { chain c { type nat hook prerouting priority -100; ip saddr 10.77.1.1 tcp dport 1 redirect to :2; }; }
EOF
"""


def hosts_here() -> tuple[str, str] | None:
    """Return why hosts cannot be made here, and what to do about it; None if they can. It tries, and removes what it
    made."""
    for tool, package in _TOOLS.items():
        if _path_of(tool) is None:
            return f"there is no {tool}, by which networks are made and cut", f"install {package}"
    if os.geteuid() != 0:
        return "networks can be made and cut by root only", "run it as root, or in a container where you are"
    tried = subprocess.run(
        [_path_of("unshare") or "unshare", "--net", "sh", "-c", _TRY],
        capture_output=True,
        text=True,
        check=False,
        env=_environment(),
    )
    if tried.returncode:
        said = (tried.stderr.strip().splitlines() or ["nothing"])[0]
        return f"this kernel has no namespaces, bridges or nf_tables for it ({said})", "use one that has them"
    return None


def left_of(spaces: Sequence[int]) -> list[str]:
    """Return the network namespaces, given by inode numbers, that still have a process or a name."""
    found = set()
    for folder in ("/proc", str(NAMED)):
        with suppress(FileNotFoundError):
            for name in os.listdir(folder):
                with suppress(OSError):
                    path = f"/proc/{name}/ns/net" if folder == "/proc" else f"{folder}/{name}"
                    if (folder != "/proc" or name.isdigit()) and os.stat(path).st_ino in spaces:
                        found.add(f"network namespace {os.stat(path).st_ino}: {path}")
    return sorted(found)


class HostSpread(NamedTuple):
    """How a job is spread over hosts."""

    trays: int
    """The number of trays; each gets a host, with a launcher of its own."""
    links: bool
    """Whether the links between the trays and the coordinator can be made bad."""


class Hosts:
    """The hosts of one job: ``head`` for the coordinator, and one for each of ``trays``.

    ``folder`` is created; it holds the files that give each host its own boot id and names. Raises `Unsupported` when
    the machine refuses.
    """

    def __init__(self, folder: Path, trays: Sequence[str], undo: UndoLog) -> None:
        assert len(trays) <= TRAYS_MAX, "checked with the command"
        self.tag = f"rackrun-chaos-{uuid.uuid4().hex[:8]}"
        self.trays = tuple(trays)
        self._undo, self._record = undo, undo.record(RemoveHosts(self.tag))
        folder.mkdir()
        names = folder / "names"
        self._of = {
            name: NamespaceHost(
                name=name,
                address="10.77.0.1" if name == HEAD else f"10.77.1.{trays.index(name) + 1}",
                space=self.space(name),
                boot=str(folder.resolve() / f"{name}.boot"),
                names=str(names.resolve()),
            )
            for name in (HEAD, *trays)
        }
        names.write_text("127.0.0.1 localhost\n" + "".join(f"{h.address} {h.name}\n" for h in self._of.values()))
        for host in self._of.values():
            Path(host.boot).write_text(f"{uuid.uuid4()}\n")
        try:
            self._make()
        except OSError as error:
            self.close()
            raise Unsupported(
                f"hosts for the trays cannot be made: {error}.", remedy="see rackctl chaos doctor."
            ) from error
        self.numbers = tuple(os.stat(self.space(name)).st_ino for name in (_SWITCH, *self._of))
        """The inode numbers of all its namespaces."""

    def __getitem__(self, name: str) -> NamespaceHost:
        return self._of[name]

    @property
    def names(self) -> list[str]:
        return list(self._of)

    @property
    def switch(self) -> str:
        """The name of the switch's namespace. Its ports have the names of the hosts."""
        return f"{self.tag}-{_SWITCH}"

    def named(self, host: str) -> str:
        """Return the name of the host's namespace."""
        return f"{self.tag}-{host}"

    def space(self, host: str) -> str:
        return str(NAMED / self.named(host))

    def command(self, host: str, words: Sequence[str], python: str) -> list[str]:
        """Return the command that runs ``words`` on a host."""
        there = msgspec.json.encode(self._of[host]).decode()
        return [python, "-m", "rackrun.chaos.testbed.network.enter_host", there, *words]

    def filter(self, space: str, rules: str) -> None:
        """Install nf_tables ``rules`` in a namespace, given by name: all of them or none. Raises OSError."""
        _call(["ip", "netns", "exec", space, "nft", "-f", "-"], rules)

    def counters(self, space: str, family: str, table: str) -> dict[str, int]:
        """Return the packets that each counter of a table has counted, by the counter's name."""
        told = _call(["ip", "netns", "exec", space, "nft", "-j", "list", "counters", "table", family, table])
        found = (one.get("counter") for one in json.loads(told)["nftables"])
        return {one["name"]: int(one["packets"]) for one in found if one}

    def knock(self, of: str, at: str) -> None:
        """Try once to open a connection from host ``of`` to host ``at``, without waiting for the result."""
        with visit(self.space(of)), socket.socket(socket.AF_INET, socket.SOCK_STREAM) as knocking:
            knocking.setblocking(False)
            with suppress(OSError):  # it may be refused at once
                knocking.connect((self[at].address, 9))

    def close(self) -> None:
        """Remove all namespaces, and return when they are gone. No process may live in them any more."""
        self._undo.heal(self._record)

    def left(self) -> tuple[str, ...]:
        """Return the network namespaces that still have a process or a name after `close`.

        Waits up to `_SETTLE_S` seconds for the kernel to free them.
        """
        deadline = time.monotonic() + _SETTLE_S
        while (left := left_of(self.numbers)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return tuple(left)

    def _make(self) -> None:
        _batch([], [f"netns add {self.named(name)}" for name in (_SWITCH, *self._of)])
        _batch(
            ["-n", self.switch],
            [f"link add name {_BRIDGE} type bridge forward_delay 0", f"link set {_BRIDGE} up", "link set lo up"],
        )
        _batch(
            [],
            [
                f"link add name {name} netns {self.switch} type veth peer name eth0 netns {self.named(name)}"
                for name in self._of
            ],
        )
        _batch(["-n", self.switch], [f"link set {name} master {_BRIDGE} up" for name in self._of])
        for name, host in self._of.items():
            up = ["link set lo up", f"addr add {host.address}/16 dev eth0", "link set eth0 up"]
            _batch(["-n", self.named(name)], up)


def _batch(options: list[str], lines: list[str]) -> None:
    _call(["ip", *options, "-batch", "-"], "\n".join(lines) + "\n")


def _call(words: list[str], given: str = "") -> str:
    done = subprocess.run(words, input=given, capture_output=True, text=True, check=False, env=_environment())
    if done.returncode:
        raise OSError(done.returncode, f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _path_of(tool: str) -> str | None:
    return shutil.which(tool, path=_environment()["PATH"])


def _environment() -> dict[str, str]:
    """Return the environment for network tools, whose folders only root's shells search by default."""
    return {**os.environ, "PATH": os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])}
