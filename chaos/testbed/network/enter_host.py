"""Make this process one of another host, by Linux namespaces.

Network, host name, ``/etc/hosts`` and boot id are the host's own; the file system and the processes are shared. Run as
``python -m rackrun.chaos.testbed.network.enter_host HOST COMMAND...``, where HOST is a `NamespaceHost` as JSON. When the
launcher on the coordinator's host preloads the module (``--preload rackrun.chaos.testbed.network.enter_host``), that
launcher's agent moves to the host in ``RACKRUN_CHAOS_AGENT_HOST``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
from collections.abc import Iterator

import msgspec

__all__ = ["AGENT_HOST", "NamespaceHost", "enter", "visit"]

AGENT_HOST = "RACKRUN_CHAOS_AGENT_HOST"
_NEWNS, _NEWUTS, _NEWNET = 0x00020000, 0x04000000, 0x40000000
_BIND, _REC, _PRIVATE = 0x1000, 0x4000, 0x40000
_libc = ctypes.CDLL(None, use_errno=True)
_AGENT = "rackrun.agent.__main__"


class NamespaceHost(msgspec.Struct, frozen=True, kw_only=True):
    """A host for one tray, or for the coordinator."""

    name: str
    address: str
    space: str
    """The file of its network namespace."""
    boot: str
    """The file with its boot id."""
    names: str
    """The file that is its ``/etc/hosts``."""


def enter(host: NamespaceHost) -> None:
    """Move this process, and all that it starts from now on, to ``host``. Call it once. Needs root; raises OSError."""
    if _is_there(host.space):
        return
    _set_network(host.space)
    _done(_libc.unshare(_NEWNS | _NEWUTS), "unshare")
    _done(_libc.mount(b"none", b"/", None, _REC | _PRIVATE, None), "mount")
    for file, over in ((host.boot, "/proc/sys/kernel/random/boot_id"), (host.names, "/etc/hosts")):
        _done(_libc.mount(os.fsencode(file), os.fsencode(over), None, _BIND, None), f"mount over {over}")
    socket.sethostname(host.name)


@contextlib.contextmanager
def visit(space: str) -> Iterator[None]:
    """Within this context, sockets that this thread makes are in the network namespace ``space``."""
    with open("/proc/thread-self/ns/net", "rb") as home:
        _set_network(space)
        try:
            yield
        finally:
            _done(_libc.setns(home.fileno(), _NEWNET), "setns")


def _set_network(space: str) -> None:
    with open(space, "rb") as file:
        _done(_libc.setns(file.fileno(), _NEWNET), f"setns {space}")


def _is_there(space: str) -> bool:
    return os.stat(space).st_ino == os.stat("/proc/thread-self/ns/net").st_ino


def _done(result: int, what: str) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _agent_enters() -> None:
    """Move the agent to its host: after the fork, or at once in a new interpreter, which has no socket yet."""
    host = msgspec.json.decode(os.environ[AGENT_HOST], type=NamespaceHost)
    main = getattr(sys.modules["__main__"], "__spec__", None)
    if main is not None and main.name == _AGENT:
        enter(host)
    else:
        os.register_at_fork(after_in_child=lambda: enter(host))


if __name__ == "__main__":
    enter(msgspec.json.decode(sys.argv[1], type=NamespaceHost))
    os.execvp(sys.argv[2], sys.argv[2:])
elif AGENT_HOST in os.environ:
    _agent_enters()
