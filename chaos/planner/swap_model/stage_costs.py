"""The cost of each stage of a swap on GPUs, with the source of each figure and its growth with the number of ranks.

We measured none of these figures on GPUs. A figure is *public* (from an issue or a document that anybody can read),
*measured* (by us, on the hardware that its source names), or *reasoned* (between such points, or from what a call has
to do). `rackrun.chaos.planner.swap_model.fit_measurements` replaces them by what the GPU kit has measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal, TypeAlias

import msgspec

__all__ = [
    "FIGURES",
    "GROWN_BY_S",
    "SHRUNK_BY_S",
    "Figure",
    "Figures",
    "Link",
    "Source",
    "between",
    "built_s",
    "cold_s",
]

Source: TypeAlias = Literal["measured", "public", "reasoned"]
Link: TypeAlias = Literal["nvlink", "host", "network"]


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One constant. ``low`` and ``high`` bound what its source makes likely."""

    low: float
    likely: float
    high: float
    source: Source
    where: str
    """What was measured, and by whom; or the reasoning."""

    def __post_init__(self) -> None:
        assert 0 <= self.low <= self.likely <= self.high < math.inf, "low, likely, high"

    def times(self, factor: float) -> Figure:
        """Return the figure multiplied by ``factor``."""
        return msgspec.structs.replace(
            self, low=self.low * factor, likely=self.likely * factor, high=self.high * factor
        )


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """All figures, in seconds, except the rates of ``restore``, which are in bytes a second."""

    notice: Figure
    """From the death of a process until the coordinator knows."""
    notice_doubling: Figure
    """The additional time for each doubling of the ranks beyond 64, because reports pass more processes."""
    revoke: Figure
    """From the command until the kernels have left and the device is quiet.

    It does not depend on the number of ranks, because each ends its own kernels.
    """
    decide: Figure
    """The window that gathers faults, the decision, and writing the plan to the coordinator's disk."""
    build: Figure
    """Building a communicator of two ranks, in a process that has built others before."""
    build_growth: Figure
    """The factor of (size ** 0.7 - 2 ** 0.7): see `built_s`."""
    first_build: Figure
    """The additional time of a process's first communicator, for 8 ranks: kernels are loaded, network cards opened,
    proxies started."""
    first_build_doubling: Figure
    """The additional time for each doubling of the size beyond 8."""
    host_pair: Figure
    """One connection of a group on hosts (gloo), where each rank connects to each other one, one after another."""
    restore: Mapping[Link, Figure]
    restore_start: Figure
    """The time before the first byte (manifests, buffers), and afterwards for the digests."""


EAGER_RANKS, GATE_FANOUT = 128, 32
"""The limits of `rackrun.worker.communicators.on_demand` and `rackrun.worker.communicators.gate_tree`.

A group of more than ``EAGER_RANKS`` ranks is built on demand, and the gate of a larger world goes over blocks of
``GATE_FANOUT`` hosts.
"""

_WATERFALL = "benchmarks/results/waterfall.json: 4 ranks on two busy CPU cores"

FIGURES = Figures(
    notice=Figure(
        low=0.001, likely=0.005, high=0.03, source="measured",
        where=f"a robust mutex and a pidfd tell within milliseconds ({_WATERFALL})",
    ),
    notice_doubling=Figure(
        low=0.004, likely=0.009, high=0.014, source="reasoned", where="20 to 50 ms more at 1,024 ranks, through a tree of agents"
    ),
    revoke=Figure(
        low=0.005, likely=0.03, high=0.5, source="reasoned",
        where="ncclCommRevoke sets flags that kernels poll (NCCL 2.30 source); NVRx: 0.5 s and 0.01 s a pending kernel with abort",
    ),
    decide=Figure(low=0.01, likely=0.02, high=0.05, source="measured", where=f"gather 5 ms, decision, SQLite, wire ({_WATERFALL})"),
    build=Figure(
        low=0.25, likely=0.45, high=0.7, source="reasoned",
        where="NVIDIA/nccl #1646, 8 B200: allocation 0.4, bootstrap 0.6, topology 1.1, connections 0.4 s, most of it once a process",
    ),
    build_growth=Figure(
        low=0.012, likely=0.029, high=0.045, source="reasoned",
        where="through 0.5 to 1.5 s at 64, 2 to 5 s at 1,024, 10 to 30 s at 10,000 ranks, a root for each 128; NVIDIA/nccl #1156: minutes with one root",
    ),
    first_build=Figure(
        low=1.0, likely=1.7, high=2.5, source="public", where="NVIDIA/nccl #1646: 2.5 s for the first one of 8 B200"
    ),
    first_build_doubling=Figure(low=0.1, likely=0.17, high=0.25, source="reasoned", where="12 to 35 s at 10,000 ranks, cold"),
    host_pair=Figure(
        low=0.0001, likely=0.0003, high=0.001, source="reasoned", where="a TCP connection in a data centre: two round trips and an accept"
    ),
    restore={
        "nvlink": Figure(
            low=100e9, likely=200e9, high=400e9, source="reasoned", where="a half of NVLink 4's 450 GB/s each way, by grouped sends"
        ),
        "host": Figure(
            low=12e9, likely=45e9, high=55e9, source="reasoned", where="PCIe 5 x16, pinned; 12 to 16 GB/s where it is not (DeepSpeed #8283)"
        ),
        "network": Figure(low=10e9, likely=40e9, high=48e9, source="reasoned", where="a card of 400 Gb/s for each GPU; 100 Gb/s at the least"),
    },
    restore_start=Figure(low=0.005, likely=0.02, high=0.1, source="reasoned", where="a manifest, a digest of what has come"),
)  # fmt: skip

_REFERENCE = 2
_EXPONENT = 0.7
"""The exponent of the growth of a build with the number of ranks.

It lies between a bootstrap that is a ring over all ranks (1.0) and one by roots (0.5), and fits the three ranges of
`FIGURES.build_growth`.
"""

SHRUNK_BY_S: tuple[tuple[int, float, float], ...] = ((256, 1.2, 1.7), (512, 2.0, 2.6), (1024, 2.0, 3.8))
"""(ranks, low, high) of ncclCommShrink with ABORT; NVIDIA-NeMo/RL #3186 and #3334."""
GROWN_BY_S: tuple[tuple[int, float, float], ...] = ((32, 1.73, 1.73), (256, 1.9, 1.9), (1024, 4.19, 4.19))
"""The same for ncclCommGrow. The first use afterwards takes 1.5 to 2.2 s more there."""


def built_s(build: float, growth: float, size: int) -> float:
    """Return the seconds to build a communicator of ``size`` ranks, 0 for one rank. ``build``: the seconds for two
    ranks."""
    if size < 2:
        return 0.0
    return build + growth * (math.pow(size, _EXPONENT) - math.pow(_REFERENCE, _EXPONENT))


def cold_s(first: float, doubling: float, size: int) -> float:
    """Return the additional seconds if a member has never built a communicator."""
    return 0.0 if size < 2 else first + doubling * max(math.log2(size / 8), 0.0)


def between(points: Sequence[tuple[int, float, float]], ranks: int) -> tuple[float, float] | None:
    """Return low and high at ``ranks``, interpolated between published points over the logarithm of the ranks.

    Below the first point its values are returned; beyond the last, None, because nothing has been published.
    """
    if ranks > points[-1][0]:
        return None
    if ranks <= points[0][0]:
        return points[0][1:]
    (left, *low), (right, *high) = next((one, other) for one, other in pairwise(points) if one[0] <= ranks <= other[0])
    share = math.log(ranks / left) / math.log(right / left)
    return low[0] + share * (high[0] - low[0]), low[1] + share * (high[1] - low[1])
