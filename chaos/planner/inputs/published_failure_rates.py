"""Published failure rates of large synchronous jobs, as presets.

Each rate counts what interrupted such jobs, on 8-GPU hosts of other generations than a rack of 72 GPUs. Use them until
you have figures of your own.
"""

from __future__ import annotations

from typing import NamedTuple

from rackrun.chaos.base.errors import PlannerError

__all__ = ["PRESETS", "Preset", "preset"]

_DAY_S = 86400.0


class Preset(NamedTuple):
    """A published failure rate."""

    name: str
    per_gpu_day: float
    """Interruptions of one GPU a day."""
    title: str
    source: str
    figure: str
    """What the source says, from which the rate follows."""

    def mtbf_s(self, gpus: int) -> float:
        """Return the mean seconds between failures of a unit of ``gpus`` GPUs."""
        return _DAY_S / (self.per_gpu_day * gpus)


PRESETS = {
    one.name: one
    for one in (
        Preset(
            "llama3",
            419 / (54 * 16384),
            "The Llama 3 Herd of Models",
            "arXiv:2407.21783, section 3.3.4",
            "419 unexpected interruptions of 16,384 H100 in 54 days",
        ),
        Preset(
            "rsc-1",
            6.50e-3 / 8,
            "Revisiting Reliability in Large-Scale Machine Learning Research Clusters",
            "arXiv:2410.21680, HPCA 2025",
            "6.50 failures per 1,000 node-days, nodes of 8 A100; 1.8 h for 16,384 GPUs",
        ),
        Preset(
            "rsc-2",
            2.34e-3 / 8,
            "Revisiting Reliability in Large-Scale Machine Learning Research Clusters",
            "arXiv:2410.21680, HPCA 2025",
            "2.34 failures per 1,000 node-days, nodes of 8 A100",
        ),
        Preset(
            "ant-a100",
            0.08 / 30,
            "DLRover's documentation (Ant Group)",
            "github.com/intelligent-machine-learning/dlrover, docs/",
            "8 % of A100 GPUs a month",
        ),
    )
}


def preset(name: str) -> Preset:
    """Return the preset of this name. Raises PlannerError if there is none."""
    if name not in PRESETS:
        raise PlannerError(f"there is no preset {name!r}.", remedy=f"presets are {', '.join(PRESETS)}.")
    return PRESETS[name]
