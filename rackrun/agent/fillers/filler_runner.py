"""Fillers: a low-priority command beside every waiting spare, which ends when the spare is needed.

Each runs below a supervisor process (`rackrun.agent.fillers.filler_supervisor`), which ends it and everything that it
has started. This module is the agent's side: it decides when a filler starts and ends, and records what it has used.
Nothing here blocks. A filler that its supervisor does not end in time is killed from here, with its supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from rackrun.agent.fillers.filler_supervisor import EXEC_FAILED, HELD, NOW, FillerOrder
from rackrun.agent.gpus.start_checks import SHARE
from rackrun.agent.host import proc
from rackrun.agent.host.cgroup import Cgroup
from rackrun.agent.host.priority import finish_off
from rackrun.agent.worker_start.worker_logs import WorkerLogs
from rackrun.protocol.agent_config import FillerConfig
from rackrun.protocol.ids import Incarnation, SlotId
from rackrun.protocol.wire import FillerState
from rackrun.topology.placement.rank_environment import Binding

__all__ = ["CAGE", "HOLD_S", "LATE_S", "MARK", "Fillers"]

MARK = "RACKRUN_FILLER"
"""Environment variable of a filler and all its descendants: its slot, the spare's incarnation, and the number of this
start."""
LATE_S = 0.15
"""Seconds beyond a filler's grace time that its supervisor may need before the agent ends the filler itself."""
HOLD_S = 0.25
"""A filler is stopped at once when its spare is needed, and told to end only after this many seconds, so that a
recovery has the processors."""
_AGAIN_S = 0.05
_STOP_S = 10.0
_LOOK_S = 0.01
"""Seconds between two looks for what a killed supervisor has left. Each wait is longer by this, up to twenty times."""
_LOOKS_MANY = 15
"""Number of looks that take more than a second."""
_IN_VAIN_MAX = 10
_CGROUP = "rackrun-filler-"
_ROOT = str(Path(__file__).resolve().parents[3])
CAGE = (
    "-P",
    "-S",
    "-c",
    "import sys; sys.path.append(sys.argv.pop(1)); from rackrun.agent.fillers.filler_supervisor import main; main()",
    _ROOT,
)
"""Python's arguments for the supervisor. No file in the user's folder, and no installed package, can replace a module
of Python's own."""


class _Run:
    """One start of one filler."""

    def __init__(self, slot: SlotId, incarnation: Incarnation, number: int, began: float) -> None:
        self.slot, self.incarnation, self.number, self.began = slot, incarnation, number, began
        self.mark = f"{slot}:{incarnation}:{number}"
        self.pid = 0
        """Process id of its supervisor."""
        self.control = -1
        self.cpu_s = 0.0
        self.cgroup: Cgroup | None = None
        self.because = ""
        """Why it has to end; "": it may run."""
        self.asked = 0.0
        self.time_s = 0.0
        """Seconds that it has from then on."""
        self.gone = asyncio.Event()
        self.late: asyncio.TimerHandle | None = None
        self.blamed = False
        self.looks = 0


class _Place:
    """The filler's state in one slot."""

    def __init__(self) -> None:
        self.spare: tuple[SlotId, Incarnation] | None = None
        """The spare that waits there."""
        self.run: _Run | None = None
        self.starts = 0
        self.in_vain = 0
        """Number of consecutive runs that ended at once."""
        self.pause_s = 0.0
        self.again: asyncio.TimerHandle | None = None


class Fillers:
    """All fillers of a tray, on the running loop. Without a command, none ever runs.

    ``place_of`` returns the core binding of a slot's worker. ``gpus``: number of GPUs that the tray's workers see.
    """

    def __init__(
        self,
        config: FillerConfig,
        slots: int,
        logs: WorkerLogs,
        place_of: Callable[[int], Binding],
        *,
        gpus: int,
    ) -> None:
        self._config = config
        self._logs = logs
        self._place_of = place_of
        self._pauses = config.pauses
        self._places = [_Place() for _ in range(slots if config.command else 0)]
        self._loop = asyncio.get_running_loop()
        self._sampling: asyncio.TimerHandle | None = None
        self._closing = False
        self.others: Callable[[], Iterable[int]] = tuple
        """Returns the agent's other children."""
        self.tell: Callable[[FillerState], None] = lambda _told: None
        self._gpus = gpus
        self.in_the_way = gpus > 0
        """Whether a filler's device memory may be what the spare needs. Then a promoted spare waits until the filler is
        gone."""
        self._grace_s = config.grace_s if config.grace_s is not None else (0.0 if gpus else 0.2)
        if config.command:
            Cgroup.sweep(_CGROUP)
            self._sampling = self._loop.call_later(config.sample_s, self._sample)

    # -- what the tray tells
    def spare_waits(self, slot: SlotId, incarnation: Incarnation) -> None:
        """Start a filler beside a spare that waits now, unless none is configured or one runs already."""
        if not self._places or self._closing:
            return
        place = self._place(slot)
        place.spare = (slot, incarnation)
        if place.run is None and place.again is None:
            self._start(place)

    def clear(self, slot: SlotId, because: str, *, hold: bool = False) -> asyncio.Event | None:
        """End the filler of a slot whose spare no longer waits. Return at once, with an event that is set when the
        filler is gone; None: there is none.

        ``hold``: stop the filler first and tell it to end after `HOLD_S`, unless it is in the way.
        """
        if not self._places:
            return None
        place = self._place(slot)
        place.spare = None
        if place.again is not None:
            place.again.cancel()
            place.again = None
        run = place.run
        if run is not None and not run.because:
            run.because, run.asked = because, self._loop.time()
            hold = hold and not self.in_the_way
            run.time_s = self._grace_s + (HOLD_S if hold else 0.0)
            if run.pid:
                with contextlib.suppress(OSError):  # its end is told in a moment
                    os.write(run.control, HELD if hold else NOW)
                    os.kill(run.pid, signal.SIGCONT)  # somebody may have stopped it
            run.late = self._loop.call_later(run.time_s + LATE_S, self._end_ourselves, run)
        return None if run is None else run.gone

    def reaped(self, pid: int, status: int, cpu_s: float) -> None:
        """Handle a reaped child of this process. ``cpu_s``: processor seconds of it and of all that it has reaped."""
        for place in self._places:
            if (run := place.run) is not None and run.pid == pid:
                run.pid = 0
                run.cpu_s = max(run.cpu_s, cpu_s)
                self._ended(place, run, status)

    async def stop(self) -> None:
        """End all fillers now. Wait until they are gone, for at most ten seconds."""
        self._closing = True
        if self._sampling is not None:
            self._sampling.cancel()
        slots = [place.spare[0] for place in self._places if place.spare is not None]
        slots += [place.run.slot for place in self._places if place.run is not None]
        waits = [
            asyncio.ensure_future(gone.wait())
            for slot in slots
            if (gone := self.clear(slot, "the job ends")) is not None
        ]
        if waits:
            _, pending = await asyncio.wait(waits, timeout=_STOP_S)
            for wait in pending:
                wait.cancel()
        for place in self._places:
            if place.run is not None:
                self._close(place.run)

    # -- starts
    def _start(self, place: _Place) -> None:
        place.again = None
        if place.spare is None or place.in_vain >= _IN_VAIN_MAX:
            return
        place.starts += 1
        run = place.run = _Run(*place.spare, place.starts, self._loop.time())
        run.cgroup = Cgroup.make(f"{_CGROUP}{os.getpid()}-{run.mark.replace('/', '.')}")
        index = _index_of(run.slot)
        order = FillerOrder(
            command=list(self._config.command),
            hold_s=HOLD_S,
            grace_s=self._grace_s,
            cpus=list(self._place_of(index).cpus),
            cgroup=run.cgroup.path if run.cgroup else "",
            last_in_line=self._config.last_in_line,
        )
        try:
            output = self._logs.open_filler(index)
            try:
                process = subprocess.Popen(
                    [sys.executable, *CAGE, str(os.getpid()), json.dumps(order)],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **_device(index, self._gpus, os.environ), MARK: run.mark},
                    start_new_session=True,
                )
            finally:
                os.close(output)
        except OSError as error:
            _say(f"no filler beside {run.slot}: {error}")
            self._ended(place, run, EXEC_FAILED << 8)
            return
        assert process.stdin is not None
        run.control = os.dup(process.stdin.fileno())
        process.stdin.close()
        process.returncode = 0  # the agent reaps it itself
        run.pid = process.pid
        self._report(run, "running")

    # -- ends
    def _ended(self, place: _Place, run: _Run, status: int) -> None:
        self._close(run)
        if os.WIFSIGNALED(status) and self._left_behind(place, run, status):
            return
        if run.cgroup is not None:
            run.cgroup.remove()
        place.run = None
        code, number = proc.exit_code_and_signal(status)
        how = f"exit code {code}" if number is None else f"its cage was killed by signal {number}"
        state = "ended"
        if not run.because and self._in_vain(place, run):
            state = "given up"
            where = self._logs.filler_path(_index_of(run.slot)) or "its output, with --log-dir"
            said = f"has ended at once {_IN_VAIN_MAX} times ({how}), and is not started there again"
            _say(f"the filler beside {run.slot} {said}. See {where}")
        self._report(run, state, run.because or how, self._loop.time() - run.asked if run.because else None)
        run.gone.set()
        if self._closing or place.spare is None:
            return
        if run.because:  # the next spare waits already
            self._start(place)
        else:
            place.again = self._loop.call_later(place.pause_s, self._start, place)

    def _left_behind(self, place: _Place, run: _Run, status: int) -> bool:
        """Kill what a killed supervisor has left, which are children of this process now. Return whether to look
        again."""
        if run.cgroup is not None:
            run.cgroup.kill()
        known = {*self.others(), *(other.run.pid for other in self._places if other.run)}
        strays = [pid for pid in proc.children(os.getpid()) if pid not in known]
        if not strays:
            return False
        finish_off([*strays, *(pid for stray in strays for pid in proc.descendants_now(stray))])
        run.looks += 1
        if run.looks == _LOOKS_MANY:
            self._blame(run)
        self._loop.call_later(min(run.looks * _LOOK_S, 20 * _LOOK_S), self._ended, place, run, status)
        return True

    def _in_vain(self, place: _Place, run: _Run) -> bool:
        """Count a filler that has ended by itself, and set the pause until its restart. Return whether it is given
        up."""
        ran_s = self._loop.time() - run.began
        pauses = self._pauses
        place.in_vain = place.in_vain + 1 if ran_s < pauses.at_once_s else 0
        fresh = ran_s >= pauses.forgotten_after_s or not place.pause_s
        place.pause_s = pauses.first_s if fresh else min(2 * place.pause_s, pauses.most_s)
        return place.in_vain == _IN_VAIN_MAX

    def _end_ourselves(self, run: _Run) -> None:
        """End a filler whose supervisor has not done it in time, because it is stopped, killed or delayed."""
        if run.gone.is_set():
            return
        if self._loop.time() - run.asked > run.time_s + 1.0:
            self._blame(run)
        if run.cgroup is not None:
            run.cgroup.kill()
        if run.pid:
            run.cpu_s = max(run.cpu_s, proc.cpu_seconds(run.pid))  # who is killed cannot tell of what it has not reaped
            finish_off([*proc.descendants_now(run.pid), run.pid])
        run.late = self._loop.call_later(_AGAIN_S, self._end_ourselves, run)

    def _blame(self, run: _Run) -> None:
        if not run.blamed:
            run.blamed = True
            _say(
                f"the filler beside {run.slot} does not end, though killed: the kernel holds it (a driver?), or it is another user's"
            )

    def _close(self, run: _Run) -> None:
        if run.late is not None:
            run.late.cancel()
        if run.control >= 0:
            os.close(run.control)
            run.control = -1

    # -- what is told
    def _sample(self) -> None:
        for place in self._places:
            if (run := place.run) is not None and run.pid:
                run.cpu_s = max(run.cpu_s, proc.cpu_seconds(run.pid))
                self._report(run, "running")
        self._sampling = self._loop.call_later(self._config.sample_s, self._sample)

    def _report(self, run: _Run, state: str, because: str = "", gone_s: float | None = None) -> None:
        self.tell(
            FillerState(
                slot=run.slot,
                incarnation=run.incarnation,
                start=run.number,
                state=state,
                seconds=self._loop.time() - run.began,
                cpu_s=run.cpu_s,
                because=because,
                gone_s=gone_s,
            )
        )

    def _place(self, slot: SlotId) -> _Place:
        return self._places[_index_of(slot)]


def _device(index: int, gpus: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that show a filler the GPU of its slot, as workers count them, and no other GPU."""
    if environment.get(SHARE) == "1" and gpus:
        index %= gpus
    order = {"CUDA_DEVICE_ORDER": environment.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")}
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return {**order, "CUDA_VISIBLE_DEVICES": str(index)}
    entries = [entry.strip() for entry in visible.split(",")]
    return {**order, "CUDA_VISIBLE_DEVICES": entries[index] if index < len(entries) else ""}


def _index_of(slot: SlotId) -> int:
    return int(slot.rpartition("/")[2])


def _say(text: str) -> None:
    print(f"rackrun: agent: {text}", file=sys.stderr)
