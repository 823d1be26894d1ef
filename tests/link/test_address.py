"""Addresses as people and machines write them."""

from __future__ import annotations

import contextlib
import socket

import pytest

from rackrun.link.address import (
    connection_to,
    host_and_port,
    is_loopback,
    join,
    listen,
    listen_everywhere,
    listen_on,
    take_no_more,
)

GOOD = {
    "head:29400": ("head", 29400),
    "10.0.0.1:1": ("10.0.0.1", 1),
    "[::1]:29400": ("::1", 29400),
    "[fe80::1%eth0]:80": ("fe80::1%eth0", 80),
    "rack-7.example.org:65535": ("rack-7.example.org", 65535),
}
ALONE = {"head": "head", "::1": "::1", "[::1]": "::1", "fd00::17": "fd00::17", "10.0.0.1": "10.0.0.1"}
BAD = ("", ":1", "head", "head:", "head:0", "head:65536", "head:x", "head:-1", "head:²", "[::1", "::1]:2", "[::1]2", "[head]:1", "a:b:1",
       "he ad:1", "http://head:1", "[::1]:", "[]:1", "head:1/x")  # fmt: skip


@pytest.mark.parametrize(("text", "parts"), GOOD.items())
def test_an_address_is_taken_apart_and_put_together(text: str, parts: tuple[str, int]) -> None:
    assert host_and_port(text) == parts
    assert join(*parts) == text


@pytest.mark.parametrize(("text", "host"), ALONE.items())
def test_a_host_alone_has_the_default_port(text: str, host: str) -> None:
    assert host_and_port(text, 29400) == (host, 29400)


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - each has words of its own
        host_and_port(text)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.9.9", "::1"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "head", "10.0.0.1", "fd00::1", "0.0.0.0", "::", "fe80::1%lo"])
def test_no_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize("announced", ["127.0.0.1", "::1", "localhost"])
def test_only_this_host_reaches_what_listens_on_loopback(announced: str) -> None:
    with contextlib.closing(listen_on(announced)) as listening:
        assert is_loopback(listening.getsockname()[0])
        with contextlib.closing(connection_to(join(announced, listening.getsockname()[1]), 5.0)):
            pass


def test_an_announced_address_that_is_not_this_hosts_own_is_translated_on_the_way() -> None:
    with contextlib.closing(listen_on("203.0.113.7")) as listening:
        assert listening.getsockname()[0] in {"::", "0.0.0.0"}


def test_a_name_of_this_host_that_leads_to_loopback_is_no_loopback_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with contextlib.closing(listen_on("head")) as listening:
        assert listening.getsockname()[0] in {"::", "0.0.0.0"}


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_everywhere_means_both_families(host: str) -> None:
    with contextlib.closing(listen_everywhere()) as listening:
        where = join(host, listening.getsockname()[1])
        with contextlib.closing(connection_to(where, 5.0)):
            pass


def test_a_port_that_is_taken_is_said() -> None:
    with contextlib.closing(listen("127.0.0.1")) as first, pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", first.getsockname()[1])


def test_no_address_cannot_be_connected_to() -> None:
    with pytest.raises(OSError, match="has no port"):
        connection_to("nowhere", 1.0)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_who_takes_no_more_keeps_what_it_has(host: str) -> None:
    with contextlib.closing(listen(host)) as listening:
        where = join(host, listening.getsockname()[1])
        with contextlib.closing(connection_to(where, 5.0)) as before:
            listening.setblocking(True)
            with contextlib.closing(listening.accept()[0]) as accepted:
                take_no_more(listening)
                with pytest.raises(TimeoutError):
                    connection_to(where, 0.1)
                before.sendall(b"still here")
                assert accepted.recv(100) == b"still here"
