"""What a plan starts beside a job's own processes: an agent for a tray, a second coordinator on the same run folder."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rackrun.chaos.testbed.machine.processes import Process

__all__ = ["Beside", "Guest"]


@dataclass
class Guest:
    process: Process
    said: Path
    """What it has printed."""
    _popen: subprocess.Popen[bytes] = field(repr=False)

    @property
    def exit_code(self) -> int | None:
        """None: it lives."""
        return self._popen.poll()

    def last_words(self) -> str:
        lines = self.said.read_text(errors="replace").splitlines()
        return lines[-1] if lines else "it has said nothing"

    def wait(self) -> None:
        self._popen.wait()


class Beside:
    """``python``: what starts a module of it in the job. ``env`` has the job's mark, so that nothing of it outlives the job. ``arguments``: as
    the launcher's were. ``agents``: the configurations of its agents."""

    def __init__(
        self, folder: Path, python: Sequence[str], arguments: Sequence[str], env: Mapping[str, str], agents: Path
    ) -> None:
        self._folder, self._python, self._arguments, self._env, self._agents = folder, python, arguments, env, agents
        self._guests: list[Guest] = []

    @property
    def pids(self) -> set[int]:
        return {guest.process.pid for guest in self._guests}

    def agent(self, tray: str) -> Guest:
        """As a batch system starts one. Raises ``OSError`` when there is no such tray."""
        config = os.open(self._agents / tray, os.O_RDONLY)
        try:
            return self._start(["rackrun.agent", f"fd:{config}"], f"agent-{tray}", [config])
        finally:
            os.close(config)

    def coordinator(self) -> Guest:
        """As somebody who gives the same command once more."""
        return self._start(["rackrun", *self._arguments], "coordinator")

    def close(self) -> None:
        """Once nobody lives who has the mark."""
        for guest in self._guests:
            guest.wait()
        for path in self._agents.iterdir():
            path.unlink()  # a secret, though void

    def _start(self, module: Sequence[str], name: str, fds: Sequence[int] = ()) -> Guest:
        path = self._folder / f"{name}-{len(self._guests)}.txt"
        with path.open("wb") as said:
            popen = subprocess.Popen(
                [*self._python, *module],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                env=dict(self._env),
                pass_fds=fds,
                start_new_session=True,
            )
        process = Process.of(popen.pid)
        assert process is not None, "not reaped yet"
        self._guests.append(Guest(process, path, popen))
        return self._guests[-1]
