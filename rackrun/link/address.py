"""Addresses as text (``host:port``), and listening sockets, for IPv4, IPv6 (``[::1]:29400``) and host names.

Every module that formats, parses, binds or connects uses this one, so that no part of rackrun supports only one address
family.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import socket
import struct

__all__ = [
    "connection_to",
    "host_and_port",
    "is_loopback",
    "join",
    "listen",
    "listen_everywhere",
    "listen_on",
    "take_no_more",
]

_BACKLOG = 1024
_SO_ATTACH_FILTER = 26
_BPF_RETURN = 0x06


def join(host: str, port: int) -> str:
    """Return ``host:port``, with an IPv6 address in brackets, as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_and_port(address: str, default_port: int | None = None) -> tuple[str, int]:
    """Split ``host:port``, ``[ipv6]:port`` or, if there is a default port, a host alone. The host is returned without
    brackets.

    Raises ValueError if there is no host, or no port from 1 to 65535. An IPv6 address without brackets counts as a host
    alone.
    """
    text = address.strip()
    if text.startswith("["):
        host, bracket, tail = text[1:].partition("]")
        if not bracket or (tail and not tail.startswith(":")):
            raise ValueError(f"{address!r} has a bracket too many or too few")
        ipaddress.IPv6Address(host)  # only IPv6 addresses are written in brackets
        port = tail[1:]
    elif text.count(":") > 1:
        ipaddress.IPv6Address(text)
        host, port = text, ""
    else:
        host, _, port = text.partition(":")
    if not host or any(character.isspace() for character in host) or "/" in host:
        raise ValueError(f"{address!r} names no host")
    if not port:
        if default_port is None or text.endswith(":"):
            raise ValueError(f"{address!r} has no port")
        return host, default_port
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        raise ValueError(f"{address!r} has no port from 1 to 65535")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is an address that only this host can reach, or the name localhost."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    return False


def connection_to(address: str, timeout_s: float) -> socket.socket:
    """Return a TCP connection without Nagle's delay. Raises OSError, also if ``address`` is invalid."""
    try:
        host, port = host_and_port(address)
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error)) from error
    connection = socket.create_connection((host, port), timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def listen(host: str, port: int = 0, *, backlog: int = _BACKLOG) -> socket.socket:
    """Return a listening socket, non-blocking and not inherited, on the first address of ``host``. Raises OSError."""
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return _listening(socket.socket(family, socket.SOCK_STREAM), where, backlog)


def listen_everywhere(port: int = 0, *, backlog: int = _BACKLOG) -> socket.socket:
    """Return a socket that listens on all interfaces, with both families if the kernel has IPv6."""
    with contextlib.suppress(OSError):
        listening = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        except OSError:
            listening.close()
            raise
        return _listening(listening, ("::", port), backlog)
    return _listening(socket.socket(socket.AF_INET, socket.SOCK_STREAM), ("0.0.0.0", port), backlog)  # noqa: S104


def listen_on(announced: str) -> socket.socket:
    """Return a socket that listens on a free port of the announced address, and on no other address.

    It listens on all interfaces if that address is not this host's own (a translated one), or if the announced name
    resolves to loopback on this host.
    """
    try:
        found = socket.getaddrinfo(announced, None, type=socket.SOCK_STREAM)[0][4][0]
        if is_loopback(str(found)) and not is_loopback(announced):
            return listen_everywhere()
        return listen(announced)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return listen_everywhere()
        raise


def take_no_more(listening: socket.socket) -> None:
    """Make the kernel drop every packet to a listening socket; its connections stay. This needs no privilege.

    Source: ``man 7 socket``, SO_ATTACH_FILTER; the filter is one instruction, "keep 0 bytes". Raises OSError.
    """
    program = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RETURN, 0, 0, 0))
    listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HxxxxxxP", 1, ctypes.addressof(program)))


def _listening(listening: socket.socket, where: object, backlog: int) -> socket.socket:
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listening.bind(where)  # type: ignore[arg-type]  # as getaddrinfo gives it
        listening.listen(backlog)
        listening.setblocking(False)
    except OSError:
        listening.close()
        raise
    return listening
