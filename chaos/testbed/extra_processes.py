"""Start extra processes beside a job's own: an agent for a tray, or a second coordinator on the same run folder."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rackrun.chaos.testbed.machine.processes import Process

__all__ = ["ExtraProcesses", "ExtraProcess"]


@dataclass
class ExtraProcess:
    """A process that was started beside the job."""

    process: Process
    said: Path
    """The file with what the process has printed."""
    _popen: subprocess.Popen[bytes] = field(repr=False)

    @property
    def exit_code(self) -> int | None:
        """The exit code, or None while the process lives."""
        return self._popen.poll()

    def last_words(self) -> str:
        """Return the last line that the process has printed."""
        lines = self.said.read_text(errors="replace").splitlines()
        return lines[-1] if lines else "it has said nothing"

    def wait(self) -> None:
        self._popen.wait()


class ExtraProcesses:
    """Starts and keeps the extra processes of one job.

    ``python`` is the command that runs a Python module in the job, ``arguments`` are the launcher's, and ``agents`` is
    the folder with the configurations of its agents. ``env`` contains the job's mark, so that none of these processes
    outlives the job.
    """

    def __init__(
        self, folder: Path, python: Sequence[str], arguments: Sequence[str], env: Mapping[str, str], agents: Path
    ) -> None:
        self._folder, self._python, self._arguments, self._env, self._agents = folder, python, arguments, env, agents
        self._guests: list[ExtraProcess] = []

    @property
    def pids(self) -> set[int]:
        return {guest.process.pid for guest in self._guests}

    def agent(self, tray: str) -> ExtraProcess:
        """Start an agent for ``tray``, as a batch system would. Raises ``OSError`` when there is no such tray."""
        config = os.open(self._agents / tray, os.O_RDONLY)
        try:
            return self._start(["rackrun.agent", f"fd:{config}"], f"agent-{tray}", [config])
        finally:
            os.close(config)

    def coordinator(self) -> ExtraProcess:
        """Start the same command once more, as a user might, which gives a second coordinator."""
        return self._start(["rackrun", *self._arguments], "coordinator")

    def close(self) -> None:
        """Wait for the processes to end. Call it when no process with the job's mark is alive."""
        for guest in self._guests:
            guest.wait()
        for path in self._agents.iterdir():
            path.unlink()  # secret, though no longer valid

    def _start(self, module: Sequence[str], name: str, fds: Sequence[int] = ()) -> ExtraProcess:
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
        self._guests.append(ExtraProcess(process, path, popen))
        return self._guests[-1]
