"""Whole jobs of a framework's script: the stock script under torchrun, and the same under rackrun with a fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["FrameworkJobs"]

RANKS = 2
TORCHRUN_S = 150.0
RACKRUN_S = 150.0
NOT_OF_A_NEWCOMER = ("calls",)
"""What a process that has taken a rank over has only from there on."""


class FrameworkJobs:
    """Jobs of ``script``, which is given ``FOLDER KIND KILL ARGUMENTS`` and writes a file for each rank. ``run_rackrun``: the fixture."""

    def __init__(self, script: Path, folder: Path, run_rackrun: Callable[..., Any]) -> None:
        self._script, self._folder, self._run_rackrun = script, folder, run_rackrun
        self._jobs = 0

    def stock(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Train with torchrun and the framework's own classes, and return what each rank has written."""
        folder = self._new_folder()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        given = [str(self._script), str(folder), "stock", "", json.dumps(arguments)]
        pipe = subprocess.PIPE
        with subprocess.Popen([*command, *given], env=environment, stdout=pipe, stderr=pipe, text=True) as job:
            try:
                _, said = job.communicate(timeout=TORCHRUN_S)
            except subprocess.TimeoutExpired:
                job.terminate()  # torchrun ends its workers then, which SIGKILL would leave behind
                raise
        assert job.returncode == 0, said
        return _written(folder)

    def elastic(
        self, arguments: dict[str, Any], kill: str = "", *, kind: str = "elastic", options: Sequence[object] = ()
    ) -> dict[str, Any]:
        """Train with rackrun and one spare, and return what each rank has written. ``kill``: who is struck where."""
        folder = self._new_folder()
        given = [self._script, folder, kind, kill, json.dumps(arguments)]
        command = ["--standalone", "--nproc-per-node", RANKS + 1, "--spares", 1, *options]
        ran = self._run_rackrun([*command, *given], timeout=RACKRUN_S, env={"OMP_NUM_THREADS": "1"})
        assert ran.exit_code == 0, ran
        assert (folder / "struck").exists() == bool(kill), ran
        return _written(folder)

    def _new_folder(self) -> Path:
        folder = self._folder / f"job-{self._jobs}"
        folder.mkdir()
        self._jobs += 1
        return folder


def same(stock: dict[str, Any], elastic: dict[str, Any], *, struck: bool) -> None:
    """Assert that both have trained the same and logged the same on each rank."""
    assert elastic.keys() == stock.keys()
    for rank, found in stock.items():
        for what, value in found.items():
            if not struck or what not in NOT_OF_A_NEWCOMER:
                assert elastic[rank][what] == value, f"rank {rank}: {what}"


def _written(folder: Path) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("[0-9].json"))}
