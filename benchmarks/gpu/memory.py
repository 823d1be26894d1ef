"""How much memory of the GPU is taken: by one process, as the driver tells it, and by all together."""

from __future__ import annotations

__all__ = ["of_process", "used"]


def of_process(pid: int) -> int | None:
    """Bytes. None where NVML does not tell the memory of single processes."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        return next(
            (one.usedGpuMemory for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if one.pid == pid), None
        )
    except Exception:  # noqa: BLE001 - no NVML, no permission, another namespace of processes
        return None


def used() -> int:
    """Bytes, of all processes."""
    import torch

    free, whole = torch.cuda.mem_get_info(0)
    return whole - free
