"""Policies for `test_policy_host`, which do as the failure says. Run in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import Any

from rackrun.policy import ClusterView, Decision, Failure, Rung


class CannotBeTold(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


def choose(failure: Failure, view: ClusterView) -> Any:
    match failure.what:
        case "leaves it":
            return None
        case "nonsense":
            return "swap"
        case "wrong":
            return Decision(rung="jump")  # type: ignore[arg-type]
        case "prints":
            print("this is for the standard error")
        case "starts":
            process = subprocess.Popen(["sleep", "1000"])
            return Decision(rung=Rung.SWAP, reason=str(process.pid))
        case what:
            _misbehave(what)
    return Decision(rung=Rung.SWAP, reason=f"{view.world_size} ranks", targets=view.takeovers)


def _misbehave(how: str) -> None:  # noqa: PLR0912 - one case for each way
    match how:
        case "raises":
            raise ValueError("no idea")
        case "raises what cannot be told":
            raise CannotBeTold
        case "raises what is no text":
            raise ValueError("\ud800 " + "long " * 100_000)
        case "exits":
            sys.exit(3)
        case "dies":
            os._exit(7)
        case "dies, and a copy of it lives on":
            if os.fork() == 0:
                signal.pause()
            os._exit(7)
        case "hands its pipes on":
            if inherited := [name for name in os.listdir("/proc/self/fd") if int(name) > 2 and _inheritable(int(name))]:
                raise ValueError(f"descriptors {inherited}")
        case "loops":
            while True:
                pass
        case "forks":
            os.fork()
        case "answers itself":
            _to_every_pipe(b"swap!\n")
        case "floods":
            while True:
                _to_every_pipe(b"x" * 65536)
        case _:  # it answers
            pass


def _inheritable(number: int) -> bool:
    with contextlib.suppress(OSError):  # of the folder's list itself
        return os.get_inheritable(number)
    return False


def _to_every_pipe(data: bytes) -> None:
    for number in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(number, data)


not_a_function = 3


def other(failure: Failure, view: ClusterView) -> Decision | None:
    return Decision(rung=Rung.STOP, reason="the other one")
