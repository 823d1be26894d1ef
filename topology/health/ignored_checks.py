"""Leave out health checks that do not apply to a tray's GPUs, by the user's setting or because nothing uses the part.

A guest with one GPU of a board of eight reads NVLinks whose other ends belong to others, and perhaps a fabric
registration that is the host's. Both would make its GPU unfit for ever, though it uses neither.
`RACKRUN_HEALTH=ignore:fabric,links` says the same of any tray.
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
"""``fabric``: the registration with an NVLink fabric, and its health. ``links``: the state of NVLinks."""
_PARTS: tuple[Part, ...] = get_args(Part)


def ignored_by(environment: Mapping[str, str]) -> tuple[Part, ...]:
    """Return the parts that `HEALTH_VARIABLE` names: ``ignore:`` and parts, separated by commas.

    Empty when it is not set.

    Raises UsageError for another value.
    """
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
    """Whether the tray has a single GPU, in no NVLink domain of several hosts, so that no collective uses its links.

    ``gpus``: NVML indices of the GPUs with a slot.
    """
    here = [gpu for gpu in reading.gpus if gpu.index in gpus]
    if len(gpus) != 1 or len(here) != 1:
        return False
    (gpu,) = here
    in_domain = gpu.fabric is not None and bool(gpu.fabric.domain)
    return not in_domain and not (gpu.platform is not None and gpu.platform.chassis)


def without(reading: TrayReading, parts: Collection[Part]) -> TrayReading:
    """Return ``reading`` without these parts, as from a driver that does not know them. Unknown is never unhealthy."""
    if not parts:
        return reading
    unknown = dict.fromkeys(parts)
    return msgspec.structs.replace(reading, gpus=tuple(msgspec.structs.replace(gpu, **unknown) for gpu in reading.gpus))
