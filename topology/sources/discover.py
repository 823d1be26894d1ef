"""Discover this machine's tray and its GPUs through NVML."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from rackrun.topology.gpu_driver.nvml_watch import read_once
from rackrun.topology.gpu_driver.readings import NvmlUnavailable
from rackrun.topology.sources.partial_topology import PartialTopology, partial_of_reading

__all__ = ["discover"]


def discover(
    host: str = "", *, timeout_s: float = 30.0, env: Mapping[str, str] | None = None
) -> PartialTopology | NvmlUnavailable:
    """Return what NVML reports of this machine, or why it reports nothing. Never waits longer than ``timeout_s``."""
    reading = read_once(timeout_s=timeout_s, env=env)
    if isinstance(reading, NvmlUnavailable):
        return reading
    return partial_of_reading(reading, host or socket.gethostname().partition(".")[0])
