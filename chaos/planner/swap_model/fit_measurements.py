"""Replace figures that were only estimated by the measurements of the GPU kit.

The kit (``python3 -m benchmarks.gpu``) writes a document with a list ``checks``, and the same checks as lines of JSON;
both are read. Each check has ``id``, ``outcome`` (ok, fail, skip), ``value`` and ``unit``. A check that failed has
measured something, too, and is used; one that was skipped has not. A dry run measures a CPU, and is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rackrun.chaos.base.errors import PlannerError
from rackrun.chaos.planner.swap_model.predict_swap import Swap, SwapScenario, predict_swap
from rackrun.chaos.planner.swap_model.stage_costs import FIGURES, Figure, Figures, built_s

__all__ = ["Kit", "fitted", "held_against", "read_kit"]

_REMEDY = "give the document of the kit (benchmarks/results/gpu/*.json), or its checks.jsonl."
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
_BYTES = {"B/s": 1.0, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12, "MiB/s": 2.0**20, "GiB/s": 2.0**30}
_SPREAD = 1.5
"""The factor within which the median of one machine is assumed to bound another's."""


class KitCheck(msgspec.Struct, frozen=True, kw_only=True):
    """One check of the kit. Its other fields are for people."""

    id: str
    outcome: str
    value: float | str | None = None
    unit: str = ""


class Kit(msgspec.Struct, frozen=True, kw_only=True):
    """The checks of one file of the kit."""

    name: str
    machine: str
    """The GPU and torch version; "" if the file does not name them."""
    checks: Mapping[str, KitCheck]

    def number(self, check: str, units: Mapping[str, float]) -> float | None:
        """Return the value of a check in seconds, or in bytes a second.

        Returns None if it was not measured, or is no number in one of ``units``.
        """
        found = self.checks.get(check)
        if found is None or found.outcome not in ("ok", "fail") or not isinstance(found.value, float | int):
            return None
        if found.unit not in units or not 0 < found.value < math.inf:
            return None
        return float(found.value) * units[found.unit]


def read_kit(path: Path) -> Kit:
    """Read a file of the kit. Raises PlannerError."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise PlannerError(f"{path} cannot be read: {error.strerror}.", remedy=_REMEDY) from error
    facts: dict[str, Any] = {}
    try:
        if path.suffix == ".jsonl":
            checks = [msgspec.json.decode(line, type=KitCheck) for line in text.splitlines() if line.strip()]
            mode = ""
        else:
            document = msgspec.json.decode(text, type=dict[str, Any])
            facts, mode = document.get("facts", {}), document.get("mode", "")
            checks = msgspec.convert(document["checks"], list[KitCheck])
    except (msgspec.DecodeError, msgspec.ValidationError, KeyError) as error:
        raise PlannerError(f"{path} is no result of the GPU kit: {error}.", remedy=_REMEDY) from error
    if mode == "dry":
        raise PlannerError(
            f"{path} is of a dry run: its figures are of a CPU.", remedy="run the kit on GPUs (--mode one or box)."
        )
    gpus = facts.get("gpus") or [{}]
    machine = ", ".join(filter(None, [gpus[0].get("name", ""), f"torch {facts['torch']}" if "torch" in facts else ""]))
    return Kit(name=path.name, machine=machine, checks={one.id: one for one in checks})


def fitted(kit: Kit, figures: Figures = FIGURES) -> tuple[Figures, str]:
    """Return the figures with those measured replaced, and a text that says which these are.

    Only figures that a check is about are replaced: the growth of a build with the number of ranks stays an estimate,
    whatever eight ranks take.
    """
    found: dict[str, Any] = {}
    learned: list[str] = []

    def learn(name: str, check: str, value: float, what: str) -> None:
        found[name] = _measured(value, f"{check} of {kit.name}: {what}")
        learned.append(f"{name.replace('_', ' ')} ({check})")

    for check, size, what in (
        ("H1", 8, "eight ranks, less what eight take more than two"),
        ("C1", 2, "two ranks on one GPU, by sockets"),
    ):
        if (value := kit.number(check, _SECONDS)) is not None:
            more = built_s(0.0, figures.build_growth.likely, size)
            learn("build", check, max(value - more, value / 4), what)
            break
    for check, what in (("H3", "revoke until the device is quiet"), ("D1", "a killed peer, ranks on one GPU")):
        if (value := kit.number(check, _SECONDS)) is not None:
            learn("revoke", check, value, what)
            break
    restore = dict(figures.restore)
    if (value := kit.number("H7", _BYTES)) is not None:
        restore["nvlink"] = _measured(value, f"H7 of {kit.name}: a restore by NCCL")
        learned.append("restore over nvlink (H7)")
    if (value := kit.number("B7", _BYTES)) is not None:
        restore["host"] = _measured(value, f"B7 of {kit.name}: a restore from host memory")
        learned.append("restore over host (B7)")
    of = f"{kit.name}{f' ({kit.machine})' if kit.machine else ''}"
    told = (
        f"calibrated by {of}: {', '.join(learned)}"
        if learned
        else f"not calibrated: {of} has none of H1, C1, H3, D1, H7, B7"
    )
    return msgspec.structs.replace(figures, **found, restore=restore), told


def held_against(kit: Kit, figures: Figures) -> tuple[str, ...]:
    """Compare the kit's own swap, which enters no figure, with the prediction for the same eight GPUs.

    The state is left out of it, because the kit's is small.
    """
    value = kit.number("H5", _SECONDS)
    if value is None:
        return ()
    said: Swap = predict_swap(SwapScenario(ranks=7, groups={"dp": 7}, state_bytes=0), figures)
    whole = said.row("whole swap, spare warm")
    within = "within" if whole.low <= value <= whole.high else "outside"
    return (
        f"H5, a whole swap of 7 ranks and a spare: {value:.2f} s measured, {whole.low:.2f} to {whole.high:.2f} s predicted: {within}",
    )


def _measured(value: float, where: str) -> Figure:
    return Figure(low=value / _SPREAD, likely=value, high=value * _SPREAD, source="measured", where=where)
