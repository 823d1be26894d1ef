"""A: the environment. Versions, the fork server, what the driver says and how fast, and where Xids are heard."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.registry import Context, Found, Skip, check, failed

__all__: list[str] = []

ROOT = Path(__file__).resolve().parents[2]


def _python(context: Context, code: str, *arguments: str, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What ``code`` prints last, as JSON, in an interpreter of its own. RuntimeError when it fails."""
    asked = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=max(context.limit_s - 8, 5),
        env={**os.environ, **(env or {})},
        cwd=ROOT,
        check=False,
    )
    if asked.returncode or not asked.stdout.strip():
        raise RuntimeError(f"exit code {asked.returncode}: {asked.stderr.strip()[-800:]}")
    told: dict[str, Any] = json.loads(asked.stdout.strip().splitlines()[-1])
    return told


@check(
    "A1", "what rackrun needs of torch's private parts, tried; NCCL's", expected="all there", limit_s=60, beside=True
)
def versions(context: Context) -> Found:
    import torch
    import torch.distributed as dist

    from rackrun.worker.torch_compat import check as check_torch
    from rackrun.worker.torch_compat.feature_probe import problems

    check_torch()
    lacking = [f"{need}: {why}" for need, why in problems().items()]
    if not context.dry:
        if not dist.is_nccl_available():
            return failed("this torch has no NCCL")
        context.note(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
        group = dist.ProcessGroupNCCL
        context.note("ProcessGroupNCCL2 is there" if hasattr(dist, "ProcessGroupNCCL2") else "no ProcessGroupNCCL2")
        context.note(
            "_comm_ptr " + ("is there" if hasattr(group, "_comm_ptr") else "is missing: builds are awaited otherwise")
        )
        context.note("ncclCommRevoke " + ("is there" if _has_revoke() else "is missing: a break is an abort"))
    return failed("; ".join(lacking)) if lacking else Found(torch.__version__)


def _has_revoke() -> bool:
    import ctypes

    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "/libnccl" in line}
    return any(hasattr(ctypes.CDLL(path), "ncclCommRevoke") for path in paths)


_FORK = """
import json, os, sys, time
from rackrun.agent.worker_start.fork_server import preload, unsound_because
failed = preload(sys.argv[2:])
why, fds = unsound_because(), [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{n}")]
reading, writing = os.pipe()
began = time.monotonic()
if os.fork() == 0:
    try:
        import torch
        found = float((torch.ones(1024, device=sys.argv[1]) * 2).sum().item())
        told = {"sum": found, "seconds": time.monotonic() - began}
    except BaseException as error:
        told = {"error": f"{type(error).__name__}: {error}"[:400]}
    os.write(writing, json.dumps(told).encode())
    os._exit(0)
os.close(writing)
heard = b"".join(iter(lambda: os.read(reading, 65536), b""))
os.wait()
print(json.dumps({"failed": failed, "unsound": why, "nvidia": [fd for fd in fds if "/dev/nvidia" in fd], **json.loads(heard)}))
"""
_FORK_ENV = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


@check(
    "A2",
    "a fork of the server that has imported all: its first operation",
    expected="sound; <= 0.6 s on a GPU",
    limit_s=60,
)
def forked(context: Context) -> Found:
    told = _python(context, _FORK, str(context.device), env=_FORK_ENV)
    if told["failed"] or told["unsound"] or "error" in told:
        return failed("; ".join([*told["failed"], told["unsound"], told.get("error", "")]).strip("; "))
    if told["nvidia"]:
        context.note(f"the server has {', '.join(told['nvidia'])} open")
    if told["sum"] != 2048.0:
        return failed(f"the first operation of a fork gives {told['sum']}, not 2048")
    return Found(told["seconds"], "s", "" if told["seconds"] <= 0.6 else "slower than expected, and sound")


_PRELOADS = {
    "kit_asks": "import torch\ntorch.cuda.is_available()\ntorch.cuda.device_count()\n",
    "kit_initialises": "import torch\ntorch.cuda.init()\ntorch.ones(1, device='cuda')\n",
    "kit_threads": "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n",
    # In a dry run a file stands for the device that CUDA opens.
    "kit_opens": "import os\nfrom rackrun.agent.worker_start import fork_server\nfork_server._CUDA_DEVICE = os.path.realpath(__file__)\nheld = open(__file__)\n",
}


@check(
    "A3",
    "preloads after which a fork is not sound",
    expected="reported, or the fork computes",
    limit_s=100,
    beside=True,
)
def unsound(context: Context) -> Found:
    for name, text in _PRELOADS.items():
        (context.folder / f"{name}.py").write_text(text)
    env = {**_FORK_ENV, "PYTHONPATH": os.pathsep.join([str(context.folder), os.environ.get("PYTHONPATH", "")])}
    must_report = ["kit_opens"] if context.dry else ["kit_initialises", "kit_threads"]
    wrong, said = [], []
    for name in must_report if context.dry else [*must_report, "kit_asks"]:
        told = _python(context, _FORK, str(context.device), name, env=env)
        said.append(f"{name}: {told['unsound'] or 'sound'}")
        if told["failed"]:
            wrong.append(f"{name} could not be imported: {told['failed']}")
        if not told["unsound"] and (name in must_report or "error" in told):
            wrong.append(f"{name} is not reported: {told.get('error', 'the fork computes')}")
    return failed("; ".join(wrong)) if wrong else Found("reported", note="; ".join(said))


# -- the driver
def driver_environment(context: Context) -> dict[str, str]:
    """Nothing; in a dry run the driver that plays NVIDIA's, compiled here. It has one tray of eight GPUs."""
    if not context.dry:
        return {}
    if shutil.which("gcc") is None:
        raise Skip("there is no gcc to compile a driver that plays NVIDIA's")
    from rackrun.chaos.testbed.fake_nvml.fake_driver import FakeRack, build
    from rackrun.topology.model.rack_file import read_rack_file

    topology = read_rack_file(ROOT / "examples/racks/hgx-h100.yaml")
    rack = FakeRack.create(context.folder / "rack.state", topology)
    return rack.environment(build(context.folder / "driver"), next(iter(topology.trays)))


@check("A4", "NVML's reading against nvidia-smi; preflight", expected="equal; fit", limit_s=60, beside=True)
def reading(context: Context) -> Found:
    from rackrun.topology.gpu_driver.nvml_watch import read_once
    from rackrun.topology.gpu_driver.readings import NvmlUnavailable
    from rackrun.topology.health.findings import preflight

    found = read_once(env=driver_environment(context))
    if isinstance(found, NvmlUnavailable):
        return failed(str(found))
    for gpu in found.gpus[:1]:
        fabric = "no fabric" if gpu.fabric is None else f"fabric state {int(gpu.fabric.state)}"
        context.note(f"{gpu.name}: {fabric}, {len(gpu.links or ())} links {sorted(set(gpu.links or ()))}")
        context.note(f"unknown {gpu.unknown}, refused {gpu.refused}, failing {gpu.failing}")
    wrong = [] if context.dry else _against_smi(context, found)
    wrong += preflight(found, [gpu.index for gpu in found.gpus])
    return failed("; ".join(wrong)) if wrong else Found(len(found.gpus), "GPUs")


def _against_smi(context: Context, found: Any) -> list[str]:
    if shutil.which("nvidia-smi") is None:
        context.note("there is no nvidia-smi to compare with")
        return []
    asked = subprocess.run(["nvidia-smi", "-q", "-x"], capture_output=True, text=True, timeout=30, check=False)
    if asked.returncode:
        return [f"nvidia-smi ends with {asked.returncode}: {asked.stderr.strip()[:200]}"]
    wrong, told = [], ET.fromstring(asked.stdout)
    driver = told.findtext("driver_version", "")
    if driver != found.driver:
        wrong.append(f"driver {found.driver}, and nvidia-smi says {driver}")
    by_uuid = {gpu.uuid: gpu for gpu in found.gpus}
    for node in told.findall("gpu"):
        uuid = node.findtext("uuid", "")
        gpu = by_uuid.get(uuid)
        if gpu is None:
            wrong.append(f"nvidia-smi lists {uuid}, NVML does not")
        elif gpu.name != node.findtext("product_name", ""):
            wrong.append(f"{uuid} is {gpu.name}, and nvidia-smi says {node.findtext('product_name', '')}")
        context.note(
            f"fabric by nvidia-smi: {node.findtext('fabric/state', '?')}, {node.findtext('fabric/status', '?')}"
        )
    return wrong


_READ = """
import json, time
from rackrun.topology.gpu_driver.nvml import Nvml
nvml, times = Nvml.open(), []
for _ in range(100):
    began = time.monotonic()
    reading = nvml.read()
    times.append(time.monotonic() - began)
print(json.dumps({"times": times, "gpus": len(getattr(reading, "gpus", ())), "said": str(reading)[:300]}))
"""


@check("A5", "one reading of NVML", expected="p50 <= 5 ms, p99 <= 20 ms", limit_s=60, must=False)
def reading_time(context: Context) -> Found:
    told = _python(context, _READ, env=driver_environment(context))
    if not told["gpus"]:
        return failed(told["said"])
    times = sorted(told["times"])
    p50_ms, p99_ms = 1e3 * statistics.median(times), 1e3 * times[98]
    context.note(f"p99 {p99_ms:.1f} ms, {told['gpus']} GPUs")
    return Found(p50_ms, "ms", ok=context.dry or (p50_ms <= 5 * told["gpus"] and p99_ms <= 20 * told["gpus"]))


@check(
    "A6",
    "where Xids are heard: NVML's events, the kernel's log",
    expected="one of them at least",
    limit_s=60,
    beside=True,
)
def xids_heard(context: Context) -> Found:
    from rackrun.topology.gpu_driver.kernel_log import KernelLog, KernelLogUnavailable
    from rackrun.topology.gpu_driver.nvml_watch import read_once
    from rackrun.topology.gpu_driver.readings import NvmlUnavailable

    found = read_once(env=driver_environment(context))
    if isinstance(found, NvmlUnavailable):
        return failed(str(found))
    log = KernelLog.open()
    heard = ["NVML's events"] if found.events else []
    if isinstance(log, KernelLogUnavailable):
        context.note(log.what)
    else:
        log.close()
        heard.append("/dev/kmsg")
    return (
        Found(" and ".join(heard)) if heard else failed("neither NVML's events nor /dev/kmsg: Xids are not heard here")
    )
