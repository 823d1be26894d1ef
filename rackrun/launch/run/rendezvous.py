"""Choice of the coordinator's host: the one that the endpoint names, where the first launcher takes the port."""

from __future__ import annotations

import errno
import socket
import time
import urllib.error
import urllib.request

import msgspec

from rackrun.errors import UsageError
from rackrun.link.address import is_loopback, join, listen, listen_everywhere
from rackrun.protocol.wire import PROTOCOL

__all__ = ["listen", "meet"]

_ASK_S = 15.0
"""Seconds to wait for a coordinator's answer: one that is still importing torch takes seconds."""
_FREE_PORT = "choose another port with --rdzv-endpoint, or end what uses this one."


class _Health(msgspec.Struct):
    run_id: str
    protocol: int


def meet(host: str, port: int, run_id: str) -> socket.socket | None:
    """Return the listening socket if this process hosts the coordinator; None if it runs, or will run, elsewhere.

    Raises UsageError if the port belongs to something else, or the host name does not resolve.
    """
    try:
        own = _own_address(host)
        return listen(own, port) if own else listen_everywhere(port)
    except socket.gaierror as error:
        raise UsageError(
            f"--rdzv-endpoint: the host {host} is unknown ({error.strerror}).", remedy="check the name."
        ) from error
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return None  # the endpoint is another host
        if error.errno != errno.EADDRINUSE:
            raise UsageError(f"port {port} of {host} cannot be used: {error.strerror}.", remedy=_FREE_PORT) from error
    health = _ask(host, port)
    if health is None:
        raise UsageError(f"port {port} of {host} is in use by something that is not rackrun.", remedy=_FREE_PORT)
    if health.run_id != run_id:
        raise UsageError(
            f"port {port} of {host} is in use by rackrun job {health.run_id}, this is {run_id}.", remedy=_FREE_PORT
        )
    if health.protocol != PROTOCOL:
        raise UsageError(
            f"the coordinator at {join(host, port)} speaks protocol {health.protocol}, this rackrun speaks protocol {PROTOCOL}.",
            remedy="install the same version of rackrun on every host.",
        )
    return None


def _own_address(host: str) -> str:
    """Return the address to listen on. "": all interfaces, because a host's own name often resolves to loopback, which
    other hosts cannot reach."""
    address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    return "" if is_loopback(address) and not is_loopback(host) and host == socket.gethostname() else address


def _ask(host: str, port: int) -> _Health | None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + _ASK_S
    try:
        with opener.open(f"http://{join(host, port)}/healthz", timeout=deadline - time.monotonic()) as answer:
            return msgspec.json.decode(answer.read(4096), type=_Health)
    except (OSError, ValueError, msgspec.MsgspecError, urllib.error.URLError):
        return None
    except Exception as error:  # http.client raises its own kinds when the answer is not HTTP
        if type(error).__module__ != "http.client":
            raise
        return None
