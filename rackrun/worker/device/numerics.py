"""Describes what the bits of a computation depend on besides the script, its data and its seeds: hardware, libraries
and settings.

Every worker reports its own description, and each state holds the one it was computed with. Computations that differ in
it may round differently. Nothing is stopped then, but a notice says that the same bits are not promised.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from rackrun.checkpoint.host_memory.loaded_libraries import loaded_library
from rackrun.core.lifecycle.numerics_notices import differences

__all__ = ["Numerics", "numerics_of", "unlike"]

Numerics = Mapping[str, str]
"""Readable name -> value; `UNKNOWN` for values that cannot be determined."""
UNKNOWN = "unknown"
_NONE = "none"
_VARIABLES_OF_A_GPU = (
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "TORCHINDUCTOR_DETERMINISTIC",
)
_VARIABLES_OF_A_CPU = ("MKL_CBWR", "TORCHINDUCTOR_DETERMINISTIC")
_CUBLAS_PROPERTIES = (0, 1, 2)
"""The values of libraryPropertyType: MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL."""


def numerics_of(device: torch.device) -> dict[str, str]:
    """Return the hardware, libraries and settings for ``device`` in this process now, as a script may change settings
    at any time. Does not wait for the device."""
    constant = _of_gpu(device) if device.type == "cuda" else _of_cpu()
    return constant | {name: _read(value) for name, value in _settings(device)}


@functools.cache
def _of_cpu() -> dict[str, str]:
    return {
        "torch": str(torch.__version__),
        "processor": _read(_processor),
        "CPU capability": _read(torch.backends.cpu.get_cpu_capability),
    }


@functools.cache
def _of_gpu(device: torch.device) -> dict[str, str]:
    properties = torch.cuda.get_device_properties(device)
    return {
        "torch": str(torch.__version__),
        "GPU": properties.name,
        "SMs": str(properties.multi_processor_count),
        "driver": _read(lambda: Path("/sys/module/nvidia/version").read_text().strip()),
        "CUDA": str(torch.version.cuda),
        "cuDNN": _read(torch.backends.cudnn.version),
        "cuBLAS": _read(_cublas),
        "NCCL": _read(lambda: ".".join(map(str, torch.cuda.nccl.version()))),
        "triton": _read(lambda: importlib.metadata.version("triton"), missing=_NONE),
    }


def _settings(device: torch.device) -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "deterministic algorithms", torch.are_deterministic_algorithms_enabled
    yield "float32 matmul precision", torch.get_float32_matmul_precision
    if device.type == "cuda":
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        yield "TF32 in matmul", lambda: _tf32(matmul)
        yield "TF32 in cuDNN", lambda: _tf32(cudnn)
        yield "bf16 sums in matmul", lambda: matmul.allow_bf16_reduced_precision_reduction
        yield "fp16 sums in matmul", lambda: matmul.allow_fp16_reduced_precision_reduction
        yield "cudnn.benchmark", lambda: cudnn.benchmark
        yield "cudnn.deterministic", lambda: cudnn.deterministic
    else:
        yield "threads", torch.get_num_threads
    for name in _VARIABLES_OF_A_GPU if device.type == "cuda" else _VARIABLES_OF_A_CPU:
        yield name, functools.partial(os.environ.get, name, _NONE)


def _tf32(backend: Any) -> Any:
    """Return whether a backend uses TF32. torch raises for the older name once a script has used the newer one."""
    try:
        return backend.allow_tf32
    except RuntimeError:
        return backend.fp32_precision


def unlike(state: Numerics, device: torch.device) -> str:
    """Return how this process's numerics differ from those that a ``state`` was computed with, for a message; "" for no
    known difference."""
    return differences(tuple(state.items()), tuple(numerics_of(device).items()), "here")


def _read(value: Callable[[], Any], missing: str = UNKNOWN) -> str:
    """Return ``value()`` as text, or ``missing``: torch raises `RuntimeError` where older and newer names of a setting
    were mixed, and a library may be absent."""
    with contextlib.suppress(RuntimeError, AttributeError, OSError, importlib.metadata.PackageNotFoundError):
        return str(value())
    return missing


def _processor() -> str:
    with open("/proc/cpuinfo") as lines:
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), UNKNOWN)


def _cublas() -> str:
    library = loaded_library("libcublas.so")
    if library is None:
        return UNKNOWN
    found = []
    for each in _CUBLAS_PROPERTIES:
        number = ctypes.c_int(-1)
        if library.cublasGetProperty(each, ctypes.byref(number)):
            return UNKNOWN
        found.append(str(number.value))
    return ".".join(found)
