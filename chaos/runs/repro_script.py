"""Write ``repro.sh``, which repeats a run from any folder and in any shell environment."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import rackrun

__all__ = ["write_repro"]

_OURS = ("PET_", "RACKRUN_", "OMP_", "MKL_", "CUDA_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "PYTHONHASHSEED")
"""Prefixes of the environment variables that a job may depend on."""
_NOT = ("RACKRUN_CHAOS_",)


def write_repro(
    path: Path, plan: str, command: Sequence[str], *, options: Sequence[str] = (), env: Mapping[str, str]
) -> None:
    """Write the script to ``path``.

    ``plan`` is the name of a file beside ``path``, so that both can be moved together. ``options`` are those of
    ``rackctl chaos run``. ``env`` is what the job was given beyond the environment of this process; of the latter, only
    variables that jobs depend on are written.
    """
    root = str(Path(rackrun.__file__).resolve().parents[1])
    kept = {name: value for name, value in os.environ.items() if name.startswith(_OURS) and not name.startswith(_NOT)}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [root, *_absolute(os.environ.get("PYTHONPATH", ""))]))
    exports = [f"export {name}={shlex.quote(value)}" for name, value in sorted({**kept, **env}.items())]
    run = shlex.join([sys.executable, "-m", "rackrun.ctl", "chaos", "run"])
    lines = [
        "#!/bin/sh",
        "# What was struck, again, by name and step. Options of `rackctl chaos run` may be added: --out DIR, --reference DIR, --json.",
        'here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd) || exit 2',
        f"cd {shlex.quote(os.getcwd())} || exit 2",
        *exports,
        f'exec {run} "$here"/{shlex.quote(plan)} {"".join(f"{option} " for option in options)}"$@" -- \\',
        f"  {shlex.join(command)}",
    ]
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o700)  # a job's environment may be private


def _absolute(text: str) -> list[str]:
    return [str(Path(part).resolve()) for part in text.split(os.pathsep) if part]
