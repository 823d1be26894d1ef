"""Whole jobs of a framework's script: the stock script under torchrun, and the same under rackrun with a fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["FrameworkJobs", "own_loop", "same"]

RANKS = 2
STOCK_SCRIPT = Path(__file__).with_name("stock_script.py")
TORCHRUN_S = 150.0
RACKRUN_S = 150.0


class FrameworkJobs:
    """Jobs of ``script``, which is given ``FOLDER KIND KILL ARGUMENTS`` and writes a file for each rank. ``run_rackrun``: the fixture.
    ``ranks``: how many train."""

    def __init__(self, script: Path, folder: Path, run_rackrun: Callable[..., Any], ranks: int = RANKS) -> None:
        self._script, self._folder, self._run_rackrun, self._ranks = script, folder, run_rackrun, ranks
        self._jobs = 0

    def stock(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Train with torchrun and the framework's own classes, and return what each rank has written."""
        folder = self._new_folder()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self._ranks)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        given = [str(STOCK_SCRIPT), str(self._script), str(folder), "stock", "", json.dumps(arguments)]
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
        command = ["--standalone", "--nproc-per-node", self._ranks + 1, "--spares", 1, *options]
        ran = self._run_rackrun([*command, *given], timeout=RACKRUN_S, env={"OMP_NUM_THREADS": "1"})
        assert ran.exit_code == 0, ran
        assert (folder / "struck").exists() == bool(kill), ran
        return _written(folder)

    def resumed(self, arguments: dict[str, Any], kill: str) -> dict[str, Any]:
        """Train with rackrun until ``kill`` strikes all ranks, start the job again from its last checkpoint, and return
        what each rank has written."""
        folder = self._new_folder()
        options = ["--max-restarts", 0, "--checkpoint-dir", folder / "kept", "--checkpoint-every", 3]
        command = ["--standalone", "--nproc-per-node", self._ranks, *options, self._script, folder, "elastic", kill]
        for exit_code in (3, 0):
            ran = self._run_rackrun([*command, json.dumps(arguments)], timeout=RACKRUN_S, env={"OMP_NUM_THREADS": "1"})
            assert ran.exit_code == exit_code, ran
        return _written(folder)

    def _new_folder(self) -> Path:
        folder = self._folder / f"job-{self._jobs}"
        folder.mkdir()
        self._jobs += 1
        return folder


def same(stock: dict[str, Any], elastic: dict[str, Any]) -> None:
    """Assert that both have trained, logged and called the same on each rank."""
    assert elastic.keys() == stock.keys()
    for rank, found in stock.items():
        for what, value in found.items():
            assert elastic[rank][what] == value, f"rank {rank}: {what}"


def _written(folder: Path) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("[0-9].json"))}


def own_loop(
    script: Path, run_rackrun: Callable[..., Any], folder: Path, kill: str
) -> tuple[dict[str, Any], list[str]]:
    """Train by ``script``, a loop of its own that is given ``FOLDER KILL``, on two ranks and a spare. Return what each
    rank has written, and the lines that the main process has."""
    folder.mkdir()
    command = ["--standalone", "--nproc-per-node", RANKS + 1, "--spares", 1, script, folder, kill]
    ran = run_rackrun(command, timeout=RACKRUN_S, env={"OMP_NUM_THREADS": "1"})
    assert ran.exit_code == 0, ran
    assert (folder / "struck").exists() == bool(kill), ran
    return _written(folder), (folder / "main.txt").read_text().splitlines()
