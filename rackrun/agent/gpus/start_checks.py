"""Checks, before a tray joins, whether workers can compute on its GPUs at all. Pure: from a driver's reading and
torch's build.

Without these checks the job fails later: every worker fails at its first CUDA call, with an error that does not name
the cause. Or it does not fail, and computes on CPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rackrun.agent.gpus.visible_gpus import VisibleGpus
from rackrun.topology.gpu_driver.readings import GpuReading, TrayReading

__all__ = ["SHARE", "StartCheck", "check_start"]

SHARE = "RACKRUN_SHARE_GPUS"
"""Environment variable: 1 lets slots, and fillers, share GPUs in turn."""


class StartCheck(NamedTuple):
    """Result of the checks."""

    refusal: str = ""
    """Why the tray must not join, and the remedy; "": it may."""
    notes: tuple[str, ...] = ()
    """Other findings worth showing."""


def check_start(
    reading: TrayReading,
    visible: VisibleGpus,
    *,
    slots: int,
    cuda: str | None,
    filler: bool,
    environment: Mapping[str, str],
) -> StartCheck:
    """Check whether ``slots`` workers can compute here.

    ``cuda`` is ``torch.version.cuda``; None for a build without CUDA, for which nothing is checked. ``filler``: a
    second process runs on a spare's GPU.
    """
    if cuda is None:
        return StartCheck()
    shares = environment.get(SHARE) == "1"
    here = [gpu for gpu in reading.gpus if gpu.index in visible.gpus]
    found = (
        _driver(reading, cuda)
        or _slices(here, visible, slots)
        or _count(visible, slots, shares)
        or next(filter(None, (_mode(gpu, shares=shares, filler=filler) for gpu in here)), "")
    )
    return StartCheck(found, () if found else tuple(_in_use(gpu) for gpu in here if gpu.users))


def _driver(reading: TrayReading, cuda: str) -> str:
    """Return why the driver does not serve this version of CUDA; "": it does. A driver serves programs of its own major
    version, whatever the minor one (CUDA Compatibility, "Minor Version Compatibility")."""
    major = int(cuda.partition(".")[0])
    if reading.cuda is None or reading.cuda // 1000 >= major:
        return ""
    served = f"{reading.cuda // 1000}.{reading.cuda % 1000 // 10}"
    return (
        f"the driver {reading.driver} serves CUDA {served} and older, and torch is built for CUDA {cuda}: it would see no GPU. "
        f"Remedy: update the driver, or install a torch that is built for CUDA {reading.cuda // 1000}."
    )


def _slices(here: Sequence[GpuReading], visible: VisibleGpus, slots: int) -> str:
    cut = [gpu.index for gpu in here if gpu.mig]
    if slots == 1 or not (cut or visible.slices):
        return ""
    which = f"{_listed(cut)} {'is' if len(cut) == 1 else 'are'} cut into" if cut else "CUDA_VISIBLE_DEVICES names"
    return (
        f"{which} slices (MIG): CUDA shows a process one slice, and NCCL connects none, so {slots} workers cannot "
        "compute together. Remedy: nvidia-smi -mig 0, or --nproc-per-node 1."
    )


def _count(visible: VisibleGpus, slots: int, shares: bool) -> str:
    if visible.shown is None or visible.shown >= slots or (shares and visible.shown):
        return ""
    shown = "no GPU" if not visible.shown else "1 GPU" if visible.shown == 1 else f"{visible.shown} GPUs"
    why = f" ({visible.note})" if visible.note else ""
    return (
        f"{slots} workers are to run here, and CUDA shows {shown}{why}. Remedy: start no more workers a tray than it has GPUs "
        "(--nproc-per-node), correct CUDA_VISIBLE_DEVICES, or hide all GPUs (CUDA_VISIBLE_DEVICES=)."
    )


def _mode(gpu: GpuReading, *, shares: bool, filler: bool) -> str:
    reset = f"Remedy: nvidia-smi -i {gpu.index} -c DEFAULT"
    if gpu.mode == "prohibited":
        return f"GPU {gpu.index} is in compute mode PROHIBITED: no process may use it. {reset}."
    if gpu.mode != "exclusive":
        return ""
    exclusive = f"GPU {gpu.index} is in compute mode EXCLUSIVE_PROCESS"
    if gpu.users:
        return f"{exclusive}, and {_processes(gpu)} it already. {reset}, or end that process."
    if shares:
        return f"{exclusive}, and several workers are to share it ({SHARE}=1). {reset}."
    if filler:
        return f"{exclusive}, and a filler is to run beside its spare. {reset}, or leave --filler out."
    return ""


def _in_use(gpu: GpuReading) -> str:
    return f"GPU {gpu.index}: {_processes(gpu)} it already; what it holds of the memory is missing to the worker there"


def _processes(gpu: GpuReading) -> str:
    pids = ", ".join(map(str, gpu.users))
    return f"process {pids} uses" if len(gpu.users) == 1 else f"processes {pids} use"


def _listed(indices: Sequence[int]) -> str:
    return ("GPU " if len(indices) == 1 else "GPUs ") + ", ".join(map(str, indices))
