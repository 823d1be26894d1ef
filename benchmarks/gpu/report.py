"""Facts of the machine, the table that people read, and the document that is sent: everything that was found, and on what."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["facts", "line", "table", "write"]

ROOT = Path(__file__).resolve().parents[2]
_TABLE_NOTE_CHARS = 90
FORMAT = 1


def facts() -> dict[str, Any]:
    """Of this machine. Asked in another process: this one never opens a GPU."""
    asked = subprocess.run(
        [sys.executable, "-c", _ASK],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))},
        check=False,
    )
    if asked.returncode != 0:
        raise ValueError(f"torch cannot be asked for its GPUs: {asked.stderr.strip()[-800:]}")
    told: dict[str, Any] = json.loads(asked.stdout.splitlines()[-1])
    return {
        **told,
        "commit": _commit(),
        "python": platform.python_version(),
        "kernel": platform.release().partition("-")[0],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "driver": _driver(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("NCCL_", "TORCH_NCCL_", "CUDA_", "PYTORCH_", "RACKRUN_"))
        },
    }


_ASK = """
import json, torch
from rackrun.version import __version__
def nccl():
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except Exception:
        return ""
def triton():
    try:
        import triton
        return triton.__version__
    except ImportError:
        return ""
gpus, why = [], ""
try:
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            gpus.append({"name": p.name, "memory_gib": round(p.total_memory / 2**30, 1), "sms": p.multi_processor_count,
                         "capability": f"{p.major}.{p.minor}"})
    else:
        why = "torch.cuda.is_available() is False" if torch.version.cuda else "this torch is built without CUDA"
except Exception as error:
    why = f"{type(error).__name__}: {error}"
print(json.dumps({"rackrun": __version__, "torch": torch.__version__, "cuda": torch.version.cuda or "", "cudnn": torch.backends.cudnn.version() if gpus else None,
                  "nccl": nccl() if gpus else "", "triton": triton(), "gpus": gpus, "no_gpu": why}))
"""


def _commit() -> str:
    asked = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
    ) if (ROOT / ".git").exists() and _has("git") else None  # fmt: skip
    return asked.stdout.strip() if asked is not None and asked.returncode == 0 else ""


def _has(program: str) -> bool:
    return any(os.access(os.path.join(folder, program), os.X_OK) for folder in os.get_exec_path())


def _driver() -> str:
    try:
        told = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    found = re.search(r"\s(\d{3,4}\.\d+(?:\.\d+)?)\s", told)
    return found[1] if found else ""


def _shown(one: dict[str, Any]) -> str:
    value = one["value"]
    shown = f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
    return f"{shown} {one['unit']}".strip()


def line(one: dict[str, Any]) -> str:
    """As it is printed when the check is over."""
    note = one["note"] if one["outcome"] == "fail" else one["note"][:200]
    parts = [f"{one['outcome']:4} {one['id']:4} {one['title']}", _shown(one), note]
    return ": ".join(filter(None, parts)) + (f" ({one['seconds']} s)" if one["seconds"] else "")


def table(told: Sequence[dict[str, Any]]) -> str:
    rows = [("", "check", "found", "expected", "s", "note")]
    for one in told:
        mark = one["outcome"] if one["must"] or one["outcome"] != "fail" else "worse"
        note = " ".join(one["note"].split())
        cut = note if len(note) <= _TABLE_NOTE_CHARS else note[: _TABLE_NOTE_CHARS - 3] + "..."
        rows.append((mark, one["id"], _shown(one), one["expected"], f"{one['seconds']:.1f}", cut))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    counts = Counter(one["outcome"] for one in told)
    summed = f"{counts['ok']} ok, {counts['fail']} failed, {counts['skip']} left out"
    for outcome, words in (("not reached", "not reached"), ("fail", "must not fail")):
        if ids := [one["id"] for one in told if one["outcome"] == outcome and (one["must"] or outcome != "fail")]:
            summed += f"; {words}: {', '.join(ids)}"
    return "\n".join([*lines, summed])


def write(
    out: Path, mode: str, facts: dict[str, Any], told: Sequence[dict[str, Any]], seconds: float, code: int
) -> Path:
    """The document: to be sent, and to be kept in ``benchmarks/results/gpu``."""
    gpu = facts["gpus"][0]["name"] if facts["gpus"] else "cpu"
    name = re.sub(r"[^a-z0-9]+", "-", f"{mode}-{gpu}-torch{facts['torch'].partition('+')[0]}".lower()).strip("-")
    document = {
        "format": FORMAT,
        "mode": mode,
        "ended_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(seconds, 1),
        "exit_code": code,
        "facts": facts,
        "checks": list(told),
    }
    path = out / f"{name}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path
