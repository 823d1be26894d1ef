"""GPU health classes, verdicts, and the response to each class.

The classes, from the best to the worst, and the response to each:

========== ======== =====================================================================================
OK         leave    works
APP        restart  its process failed; the GPU is fine
UNKNOWN    swap     the evidence cannot be interpreted: keep away from the GPU, ask the operator
DEGRADED   swap     works, but worse, or not for long: replace it at a step boundary, before it fails
FABRIC     fence    its NVLink fabric is lost: the GPU itself may be fine
DRAIN_P2P  fence    every process that maps its memory must end, those on other trays too; then check again
RESET      fence    only a reset brings it back
REBOOT     fence    only a reboot of its tray brings it back
LOST       fence    it no longer answers
========== ======== =====================================================================================
"""

from __future__ import annotations

from enum import Enum
from typing import Literal

import msgspec

__all__ = ["SEVERITY", "Evidence", "Health", "Response", "Scope", "GpuVerdict", "health_of_action", "response_to"]

Scope = Literal["gpu", "tray", "peers"]
"""What is taken out of use: the GPU, its tray, or the GPU with all processes that map its memory."""


class Health(Enum):
    """Health class of a GPU, from the best to the worst; the module's docstring explains each."""

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
    """What is done with the process on a GPU."""

    LEAVE = "leave"
    RESTART = "restart"
    """The process has lost its CUDA context: start it again on the same GPU."""
    SWAP = "swap"
    """Replace the GPU at a step boundary; at once if its process is dead anyway."""
    FENCE = "fence"
    """Take the GPU out of use now."""


SEVERITY: dict[Health, int] = {health: rank for rank, health in enumerate(Health)}
"""Rank of each class by severity: 0 for `Health.OK`, larger is worse."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One observation about a GPU."""

    at_ms: int
    source: str
    """Where it was observed: ``nvml`` or ``kernel log``."""
    what: str
    health: Health
    """The health class that this observation alone implies."""
    fabric: bool = False
    """Whether the NVLink switch may be the cause as well as the GPU."""
    scope: Scope = "gpu"


class GpuVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU's health has changed, or the process on it has to be restarted; with the evidence."""

    at_ms: int
    uuid: str
    index: int
    health: Health
    response: Response
    scope: Scope
    repair: str
    """What brings the GPU back; "": nothing is needed."""
    evidence: tuple[Evidence, ...]

    @property
    def fabric(self) -> bool:
        """Whether the NVLink switch may have caused the evidence that decides the health class."""
        return any(one.fabric for one in self.evidence if one.health is self.health)

    @property
    def reasons(self) -> str:
        """The observations behind the verdict, as text."""
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
    """Return the response to a health class, the scope that it affects, and how to repair the GPU."""
    return _RESPONSES[health]


def health_of_action(action: int) -> Health:
    """Return the health class of a GPU recovery action (NVML field 230, Xid 154).

    Value 5 was GPU_RESET_BUS before it became RECOVER_IMEX_DOMAIN, so no value above 4 is acted on by itself: 5 counts
    as FABRIC, and every other value as UNKNOWN.
    """
    known = {0: Health.OK, 1: Health.RESET, 2: Health.REBOOT, 3: Health.DRAIN_P2P, 4: Health.DEGRADED, 5: Health.FABRIC}
    return known.get(action, Health.UNKNOWN)
