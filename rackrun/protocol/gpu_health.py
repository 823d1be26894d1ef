"""How a GPU is, and what is to be done about it.

The classes, from the best to the worst, and what each asks for:

========== ======== =====================================================================================
OK         leave    works
APP        restart  its process failed; the GPU is fine
UNKNOWN    swap     something nobody can interpret: keep away from it, ask the operator
DEGRADED   swap     works, worse or not for long: replace it at a step boundary, before it dies
FABRIC     fence    its NVLink fabric has gone: the GPU itself may be fine
DRAIN_P2P  fence    every process that maps its memory must go, those on other trays too; then ask again
RESET      fence    only a reset brings it back
REBOOT     fence    only a reboot of its tray brings it back
LOST       fence    it no longer answers
========== ======== =====================================================================================
"""

from __future__ import annotations

from enum import Enum
from typing import Literal

import msgspec

__all__ = ["SEVERITY", "Evidence", "Health", "Response", "Scope", "Verdict", "health_of_action", "response_to"]

Scope = Literal["gpu", "tray", "peers"]
"""What is taken out of use: the GPU, its tray, or the GPU with all processes that map its memory."""


class Health(Enum):
    OK = "ok"
    APP = "app"
    UNKNOWN = "unknown"
    DEGRADED = "degraded"
    FABRIC = "fabric"
    DRAIN_P2P = "drain_p2p"
    RESET = "reset"
    REBOOT = "reboot"
    LOST = "lost"


class Response(Enum):
    LEAVE = "leave"
    RESTART = "restart"
    """Its process has lost its CUDA context: start it again, on the same GPU."""
    SWAP = "swap"
    """At a step boundary; at once where its process is dead anyway."""
    FENCE = "fence"
    """Now."""


SEVERITY: dict[Health, int] = {health: rank for rank, health in enumerate(Health)}


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was seen."""

    at_ms: int
    source: str
    """``nvml``, ``kernel log``."""
    what: str
    health: Health
    """What it alone would make of the GPU."""
    fabric: bool = False
    """It may be the switch's doing as well as the GPU's."""
    scope: Scope = "gpu"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU's health has changed, or its process is to be started again. Carries its reasons."""

    at_ms: int
    uuid: str
    index: int
    health: Health
    response: Response
    scope: Scope
    repair: str
    """What brings the GPU back; empty where nothing is needed."""
    evidence: tuple[Evidence, ...]

    @property
    def fabric(self) -> bool:
        return any(one.fabric for one in self.evidence if one.health is self.health)

    @property
    def reasons(self) -> str:
        return "; ".join(f"{one.what} ({one.source})" for one in self.evidence) or "nothing wrong"

    def __str__(self) -> str:
        repair = f" Repair: {self.repair}." if self.repair else ""
        return f"GPU {self.index} is {self.health.value}: {self.reasons}. Response: {self.response.value}.{repair}"


_RESPONSES: dict[Health, tuple[Response, Scope, str]] = {
    Health.OK: (Response.LEAVE, "gpu", ""),
    Health.APP: (Response.RESTART, "gpu", ""),
    Health.UNKNOWN: (Response.SWAP, "gpu", "ask the operator"),
    Health.DEGRADED: (Response.SWAP, "gpu", "drain it, then reset it; replace it if that does not help"),
    Health.FABRIC: (Response.FENCE, "gpu", "look at the NVLink switches and the fabric manager"),
    Health.DRAIN_P2P: (Response.FENCE, "peers", "end all processes that map its memory, then read its state again"),
    Health.RESET: (Response.FENCE, "gpu", "drain its tray, then nvidia-smi --gpu-reset"),
    Health.REBOOT: (Response.FENCE, "tray", "reboot its tray"),
    Health.LOST: (Response.FENCE, "gpu", "reboot its tray; replace the GPU if it does not come back"),
}


def response_to(health: Health) -> tuple[Response, Scope, str]:
    """What to do, with what, and what brings it back."""
    return _RESPONSES[health]


def health_of_action(action: int) -> Health:
    """The class of a recovery action (field 230, Xid 154).

    Value 5 was GPU_RESET_BUS before it became RECOVER_IMEX_DOMAIN, so nothing above 4 is acted on by itself: 5 is taken
    for the fabric's, and all else for unknown.
    """
    known = {0: Health.OK, 1: Health.RESET, 2: Health.REBOOT, 3: Health.DRAIN_P2P, 4: Health.DEGRADED, 5: Health.FABRIC}
    return known.get(action, Health.UNKNOWN)
