"""Coverage of the fuzz: events that must happen sometimes over many seeds, and rare paths that a seed may switch on.

A mark that no seed reaches shows that the fuzz does not go where it claims to.
"""

from __future__ import annotations

import random
from collections import Counter

from rackrun.chaos.base.random_streams import stream

__all__ = ["MARKS", "Buggify", "CoverageMarks"]

MARKS = (
    "a checkpoint was not to be trusted",
    "a collective was severed",
    "a collective was seen by some only",
    "a copy on another tray was restored",
    "a GPU was unfit when ranks were placed",
    "a checkpoint was given up",
    "a corrupt rank came, and all ended well",
    "a corrupt rank was found by computing again",
    "a corrupt rank was outvoted",
    "a damaged checkpoint was passed over",
    "a world began from a checkpoint",
    "a job of a thousand units ended well",
    "a job recovered two dozen times and ended well",
    "a lease lapsed",
    "a link was resumed",
    "a loss came while others parked",
    "a loss came while others resumed",
    "a loss was finite when it was computed once more",
    "a message waited for a partition to heal",
    "a newcomer found its sources unlike each other",
    "a person was refused",
    "a planned swap was made",
    "a process outlived its exit and was killed",
    "a rank was fenced",
    "a rack was asked for",
    "a rack was taken from under its workers",
    "a replica was the source",
    "a rollback was planned",
    "a rollback went behind the one before",
    "a slot that was left out was tried again",
    "a slot was left out for a while",
    "a slow rank was told of",
    "a slow start was waited for",
    "a snapshot was damaged",
    "a snapshot was lost with its tray",
    "a snapshot was rebuilt from parity",
    "a tray came back",
    "a tray of another rack joined",
    "a tray was dismissed",
    "a unit was done again in place",
    "a worker crashed at a point",
    "a world that was given up went on alone",
    "a zombie was refused",
    "all ended well",
    "all ranks waited in a hold",
    "an old checkpoint was removed",
    "all entered main again",
    "groups could not be built",
    "it stopped for a reason",
    "replicas differed twice",
    "replicas differed, and all computed again",
    "replicas differed, and no snapshot was left",
    "somebody woke up in an older generation",
    "the policy was asked",
    "the world began again",
    "the world grew",
    "the world shrank",
)


class CoverageMarks(Counter[str]):
    """How often each mark was reached."""

    def sometimes(self, name: str) -> None:
        assert name in MARKS, f"an undeclared mark: {name}"
        self[name] += 1


class Buggify:
    """Rare paths. Each site is switched on in one seed of four, where it fires one time in four."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._sites: dict[str, random.Random | None] = {}

    def __call__(self, site: str) -> bool:
        if site not in self._sites:
            draw = stream(self._seed, "buggify", site)
            self._sites[site] = draw if draw.random() < 0.25 else None
        draw_ = self._sites[site]
        return draw_ is not None and draw_.random() < 0.25
