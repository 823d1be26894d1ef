"""Who hosts the coordinator: the host that the endpoint names, the first launcher there to take the port."""

from __future__ import annotations

import errno
import socket
import time
import urllib.error
import urllib.request

import msgspec

from rackrun.core.wire import PROTOCOL
from rackrun.errors import UsageError

__all__ = ["listen", "meet"]

_ASK_S = 15.0
"""A coordinator that is still importing torch takes seconds to answer."""
_FREE_PORT = "choose another port with --rdzv-endpoint, or end what uses this one."


class _Health(msgspec.Struct):
    run_id: str
    protocol: int


def listen(host: str, port: int) -> socket.socket:
    """A listening socket that no child inherits. Raises OSError."""
    family, kind, _, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listening = socket.socket(family, kind)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listening.bind(address)
        listening.listen(512)
        listening.setblocking(False)
    except OSError:
        listening.close()
        raise
    return listening


def meet(host: str, port: int, run_id: str) -> socket.socket | None:
    """The listening socket when the coordinator is ours to host; None when it runs, or will run, elsewhere.

    Raises UsageError when the port belongs to something else, or the host name to nobody.
    """
    try:
        return listen(_bind_address(host), port)
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
            f"the coordinator at {host}:{port} speaks protocol {health.protocol}, this rackrun speaks protocol {PROTOCOL}.",
            remedy="install the same version of rackrun on every host.",
        )
    return None


def _bind_address(host: str) -> str:
    """A host's own name often resolves to loopback, where other hosts cannot come; then listen everywhere."""
    address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    if str(address).startswith("127.") and host not in {"localhost", address} and host == socket.gethostname():
        return ""
    return str(address)


def _ask(host: str, port: int) -> _Health | None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    where = f"[{host}]" if ":" in host else host
    deadline = time.monotonic() + _ASK_S
    try:
        with opener.open(f"http://{where}:{port}/healthz", timeout=deadline - time.monotonic()) as answer:
            return msgspec.json.decode(answer.read(4096), type=_Health)
    except (OSError, ValueError, msgspec.MsgspecError, urllib.error.URLError):
        return None
    except Exception as error:  # http.client raises its own kinds when the answer is not HTTP
        if type(error).__module__ != "http.client":
            raise
        return None
