"""The TCPStores of an agent: where they listen, and what idle callers cost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LOOKS = """
import contextlib, os, socket, sys
from datetime import timedelta
import psutil
from torch.distributed import TCPStore
from rackrun.agent.worker_start.tcp_stores import TcpStores

def sockets():
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return found

host = sys.argv[1]
store = TcpStores(host, "tray-0", "token").serve()
listening = [one for one in psutil.Process().net_connections(kind="tcp") if one.status == psutil.CONN_LISTEN]
assert {one.laddr.ip for one in listening if one.laddr.port == store.port} == {host}, listening
idle = [socket.create_connection((host, store.port), 60) for _ in range(20)]
before = sockets()
client = TCPStore(host, store.port, is_master=False, timeout=timedelta(seconds=60))  # it came after them, and is served
client.set("key", "value")
assert client.get("key") == b"value"
assert sockets() <= before + 2, (before, sockets())
"""


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_it_listens_where_it_says_and_who_says_nothing_costs_no_descriptor(host: str) -> None:
    """In a process of its own: torch's threads make later forks of this one unsound."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-c", LOOKS, host], env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
