"""Providers that do not do what they should."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence

from rackrun.coordinator.user_code.local_racks import LocalRacks
from rackrun.provider import RackRequest


class Hangs(LocalRacks):
    """Nothing comes, and it does not look whether anybody still wants it."""

    def request_rack(self, request: RackRequest) -> Sequence[str]:
        while True:
            time.sleep(3600.0)


class Claims(LocalRacks):
    """It says that a rack is there, and none is."""

    def request_rack(self, request: RackRequest) -> Sequence[str]:
        return ["nowhere"]


class Dies(LocalRacks):
    def request_rack(self, request: RackRequest) -> Sequence[str]:
        os._exit(3)


class _WithoutScript(RackRequest):
    def __init__(self, of: RackRequest) -> None:
        self.__dict__ = of.__dict__

    def agent_config(
        self, tray: str, *, slots: int | None = None, advertise: str | None = None, simulated: bool = False
    ) -> bytes:
        config = json.loads(super().agent_config(tray, slots=slots, advertise=advertise, simulated=simulated))
        config["script"]["path"] = "/nonexistent/train.py"
        return json.dumps(config).encode()


class Breaks(LocalRacks):
    """Its agents join, and every worker that they start ends at once."""

    def request_rack(self, request: RackRequest) -> Sequence[str]:
        return super().request_rack(_WithoutScript(request))
