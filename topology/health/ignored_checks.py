"""What is not judged about a tray's GPUs: because the user says so, or because nobody there uses it.

A guest that has been given one GPU of a board of eight reads NVLinks whose other ends are not its own, and perhaps a fabric registration
that is the host's. Both would make its GPU unfit for ever, and it uses neither. `RACKRUN_HEALTH=ignore:fabric,links` says the same of any tray.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, TypeAlias, get_args

import msgspec

from rackrun.errors import UsageError
from rackrun.topology.gpu_driver.readings import TrayReading

__all__ = ["HEALTH_VARIABLE", "Part", "ignored_by", "is_lone", "without"]

HEALTH_VARIABLE = "RACKRUN_HEALTH"
Part: TypeAlias = Literal["fabric", "links"]
"""``fabric``: the registration with an NVLink fabric, and its health; ``links``: the state of NVLinks."""
_PARTS: tuple[Part, ...] = get_args(Part)


def ignored_by(environment: Mapping[str, str]) -> tuple[Part, ...]:
    """What `HEALTH_VARIABLE` names: ``ignore:`` and parts, separated by commas; (): it is not set, or empty. Raises UsageError."""
    text = environment.get(HEALTH_VARIABLE, "").strip()
    if not text:
        return ()
    verb, colon, names = text.partition(":")
    wanted = [name.strip() for name in names.split(",")]
    if verb != "ignore" or not colon or not all(name in _PARTS for name in wanted):
        raise UsageError(
            f"{HEALTH_VARIABLE}={text} is not understood.",
            remedy=f"give {HEALTH_VARIABLE}=ignore:{','.join(_PARTS)}, or one of the two; without it all is judged.",
        )
    return tuple(part for part in _PARTS if part in wanted)


def is_lone(reading: TrayReading, gpus: Sequence[int]) -> bool:
    """One GPU, in no NVLink domain of several hosts: whatever its links lead to, no collective of this tray goes over them.

    ``gpus``: those with a slot, as NVML counts.
    """
    here = [gpu for gpu in reading.gpus if gpu.index in gpus]
    if len(gpus) != 1 or len(here) != 1:
        return False
    (gpu,) = here
    in_domain = gpu.fabric is not None and bool(gpu.fabric.domain)
    return not in_domain and not (gpu.platform is not None and gpu.platform.chassis)


def without(reading: TrayReading, parts: Collection[Part]) -> TrayReading:
    """``reading`` as a driver would give it that does not know these parts: what is unknown is never unhealthy."""
    if not parts:
        return reading
    unknown = dict.fromkeys(parts)
    return msgspec.structs.replace(reading, gpus=tuple(msgspec.structs.replace(gpu, **unknown) for gpu in reading.gpus))
