"""The sockets of this process, as gloo's communicators find theirs."""

from __future__ import annotations

import socket

from rackrun.worker.communicators import gloo


def test_what_a_thread_has_for_a_moment_to_look_at_a_socket_is_none_of_gloos() -> None:
    """Groups are built side by side, and each looks at all sockets: one that watched it would miss a peer when it is closed."""
    with socket.socket() as one:
        before = gloo._sockets()
        with gloo._duplicate(one.fileno()) as duplicate:
            assert gloo._sockets() == before
            assert duplicate.fileno() not in before
        assert gloo._sockets() == before
