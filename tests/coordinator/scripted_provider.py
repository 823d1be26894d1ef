"""A provider that does what the request says, for test_provider_host.py."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

from rackrun.provider import RackRequest, Refused


class Obedient:
    expected_s = 7

    def __init__(self) -> None:
        self.asked: dict[str, RackRequest] = {}

    def request_rack(self, request: RackRequest) -> Sequence[str]:
        self.asked[request.name] = request
        match request.because:
            case "refuse":
                raise Refused("no quota")
            case "raise":
                raise OSError("no such queue")
            case "a word":
                return "tray-1"
            case "nothing":
                return None  # type: ignore[return-value]
            case "die":
                os._exit(3)
            case "hang":
                threading.Event().wait()
            case "wait":
                request.cancelled.wait()
                raise Refused("it was cancelled")
            case "late":
                request.cancelled.wait()
            case "take back":
                request.preempted("the queue", ["tray-1"])
            case "print":
                print("a line that is no message")
            case _:  # it does as it is asked
                pass
        return ["tray-1", f"{request.trays} x {request.slots}", request.agent_config("t", slots=3).decode()]

    def release(self, name: str) -> None:
        request = self.asked.get(name)
        how = request.because if request is not None else "unknown"
        print(f"released {name}: {how}, cancelled: {request is not None and request.cancelled.is_set()}")
        if how == "release raises":
            raise OSError("it is stuck")
        while how == "release hangs":
            time.sleep(3600.0)


def obedient() -> Obedient:
    return Obedient()


def with_words(words: str) -> Obedient:
    found = Obedient()
    found.expected_s = int(words)
    return found


def none_at_all() -> None:
    return None


NUMBER = 3
