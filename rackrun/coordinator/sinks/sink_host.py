"""The coordinator's side of a sink: a bounded queue before a process that writes.

Nothing here blocks. A sink that is slow fills the queue, and then loses its oldest values. A sink that fails is opened
again after a while, in another process, and gets what it has not confirmed once more.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from rackrun.coordinator.sinks.sink import Key, Opening, Record, Rewind, Value, line_of
from rackrun.coordinator.sinks.sink_messages import FINISH, Closed, Delivered, Failed, Note, Opened, Said
from rackrun.coordinator.sinks.targets import SinkTarget
from rackrun.coordinator.user_code.user_process import UserProcess, UserProcesses
from rackrun.protocol.ids import Position, Step

__all__ = ["END_S", "SinkHost", "Sinks"]

END_S = 15.0
"""Seconds that sinks have at the end of the job."""
_CHILD = "rackrun.coordinator.sinks.sink_child"
_WAITING_MAX = 10_000
_IN_FLIGHT_MAX = 256
_RETRY_S, _RETRY_MAX_S = 1.0, 60.0
_SILENT_S = 120.0

_said: msgspec.json.Decoder[Said] = msgspec.json.Decoder(Said)


class SinkHost:
    """One ``--log-to``. ``notice`` receives texts for people."""

    def __init__(
        self,
        opening: Opening,
        notice: Callable[[str], None],
        *,
        retry_s: float = _RETRY_S,
        waiting_max: int = _WAITING_MAX,
    ) -> None:
        self._opening = opening
        self._name = f"--log-to {opening.kind}:{opening.target}"
        self._notice = notice
        self._processes = UserProcesses()
        self._waiting: deque[tuple[int, Record | Rewind]] = deque()
        self._in_flight: deque[tuple[int, Record | Rewind]] = deque()
        self._waiting_max = waiting_max
        self._seq = 0
        self.lost = 0
        """Records that were dropped or refused."""
        self._trouble = ""
        self._retry_first_s = self._retry_s = retry_s
        self._timer: asyncio.TimerHandle | None = None
        self._tries_left: int | None = None
        """How often the child is still started again; None: as often as it takes, because the job goes on."""
        self._finishing = False
        """Whether the child has been told that nothing follows."""
        self._closed = asyncio.Event()

    def take(self, item: Record | Rewind) -> None:
        """Queue an item."""
        self._seq += 1
        self._waiting.append((self._seq, item))
        if len(self._waiting) > self._waiting_max:
            self._drop_oldest()
        if self._processes.now is None and self._timer is None:
            self._start()
        self._send()

    def pids(self) -> list[int]:
        """Return the process ids of the children, including those that are being killed."""
        return self._processes.pids()

    async def end(self, grace_s: float) -> None:
        """Deliver what is left within ``grace_s`` seconds, close the target, and say what was not delivered."""
        self._tries_left = 1
        if self._in_flight or self._waiting or self._processes.now is not None:
            if self._processes.now is None:
                self._start()  # at once, whatever went wrong before
            self._send()
            try:
                async with asyncio.timeout(grace_s):
                    await self._closed.wait()
            except TimeoutError:
                self._trouble = self._trouble or f"they were not taken within {grace_s:g} s"
                if not (self.lost or self._in_flight or self._waiting):
                    self._notice(f"{self._name} took all values, and was not closed within {grace_s:g} s: it is ended")
        left = self.lost + sum(isinstance(item, Record) for _, item in (*self._in_flight, *self._waiting))
        if left:
            why = f" ({self._trouble.rstrip('.')})" if self._trouble else ""
            self._notice(f"{self._name}: the values of {left} run.log calls were not delivered{why}")
        self.close()

    def close(self) -> None:
        """End all children."""
        self._cancel_timer()
        self._processes.close()

    # -- the child
    def _start(self) -> None:
        self._cancel_timer()
        self._processes.reap()
        try:
            argument = msgspec.json.encode(self._opening).decode()
            self._processes.now = process = UserProcess(_CHILD, argument)
        except (OSError, ValueError) as error:
            self._over(f"cannot be started: {error}")
            return
        self._finishing = False
        process.listen(self._on_line, self._over)
        self._waiting.extendleft(reversed(self._in_flight))
        self._in_flight.clear()
        self._await_answer()

    def _send(self) -> None:
        process = self._processes.now
        if process is None:
            return
        while self._waiting and len(self._in_flight) < _IN_FLIGHT_MAX:
            seq, item = self._waiting.popleft()
            self._in_flight.append((seq, item))
            process.write(line_of(seq, item))
            if len(self._in_flight) == 1:
                self._await_answer()
        if self._tries_left is not None and not self._waiting and not self._finishing:
            self._finishing = True
            process.write(FINISH)

    def _on_line(self, line: bytes) -> None:
        try:
            said = _said.decode(line)
        except msgspec.MsgspecError as error:
            self._over(f"said what cannot be read: {error}")
            return
        match said:
            case Opened():
                self._opening = msgspec.structs.replace(self._opening, fresh=False)
            case Delivered():
                self._delivered(said)
            case Note():
                self._notice(f"{self._name}: {said.text}")
            case Failed():
                self._over(said.why)
            case Closed():
                self._closed.set()
                self._cancel_timer()

    def _delivered(self, said: Delivered) -> None:
        while self._in_flight and self._in_flight[0][0] <= said.seq:
            self._in_flight.popleft()
        if self._trouble:
            self._notice(f"{self._name} takes values again")
        self._trouble, self._retry_s = "", self._retry_first_s
        if said.refused:
            if not self.lost:
                self._notice(f"{self._name} refuses values: {said.why}")
            self.lost += said.refused
        self._cancel_timer()
        if self._in_flight:
            self._await_answer()
        self._send()

    def _over(self, why: str) -> None:
        """End the child, which is of no use any more, and start another later."""
        self._processes.end()
        self._cancel_timer()
        if self._closed.is_set():
            return
        if not self._trouble:
            self._notice(
                f"{self._name} does not take values: {why.rstrip('.')}. Training goes on; the newest {self._waiting_max} "
                f"values are kept and tried again until the job ends. Remedy: see {self._opening.directory}/sinks/*.log"
            )
        self._trouble = why
        if self._tries_left == 0:
            self._closed.set()
            return
        if self._tries_left is not None:
            self._tries_left -= 1
        self._timer = asyncio.get_running_loop().call_later(self._retry_s, self._start_and_send)
        self._retry_s = self._retry_first_s if self._tries_left is not None else min(self._retry_s * 2, _RETRY_MAX_S)

    def _start_and_send(self) -> None:
        self._timer = None
        self._start()
        self._send()

    # -- time and room
    def _await_answer(self) -> None:
        self._cancel_timer()
        silent = f"has not answered for {_SILENT_S:.0f} s"
        self._timer = asyncio.get_running_loop().call_later(_SILENT_S, self._over, silent)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _drop_oldest(self) -> None:
        for number, (_, item) in enumerate(self._waiting):
            if isinstance(item, Record):  # what takes others back is never dropped
                del self._waiting[number]
                self.lost += 1
                return


class Sinks:
    """All sinks of a job. A sink is opened when the script first logs something."""

    def __init__(
        self, targets: Sequence[SinkTarget], *, run_id: str, directory: Path, notice: Callable[[str], None]
    ) -> None:
        self._targets = targets
        self._run_id, self._directory, self._notice = run_id, directory, notice
        self._hosts: list[SinkHost] = []
        self._at: Position | None = None
        self._call = 0
        self._early: list[Record] = []
        """Values that were logged before anything was committed: whether they begin a training is not known yet."""

    def write(self, at: Position, values: Mapping[str, Value], *, began: Position | None) -> None:
        """Hand a step's values to all sinks. ``began``: the first unit that this job has committed; None before that."""
        self._call = self._call + 1 if at == self._at else 0
        self._at = at
        self._early.append(Record(Key(at.step, at.phase, self._call), time.time(), dict(values)))
        if began is not None:
            self._hand_over(fresh=began <= Position(0), first_step=max(began.step, 0))

    def _hand_over(self, *, fresh: bool, first_step: int = 0) -> None:
        """Hand all values to the sinks, which are opened first. ``fresh``: a training begins with them."""
        if not self._hosts:
            openings = [self._opening(target, fresh, first_step) for target in self._targets]
            self._hosts = [SinkHost(opening, self._notice) for opening in openings]
        early, self._early = self._early, []
        for record in early:
            for host in self._hosts:
                host.take(record)

    def rewind(self, step: Step) -> None:
        """Record that the values after ``step`` were wrong."""
        self._at = None
        for host in self._hosts:
            host.take(Rewind(step))

    def pids(self) -> list[int]:
        """Return the process ids of all children."""
        return [pid for host in self._hosts for pid in host.pids()]

    async def end(self, grace_s: float) -> None:
        """Deliver what is left, close all targets, and say what was not delivered."""
        if self._early:  # a job that has committed nothing does not end a training that a target has
            self._hand_over(fresh=False)
        await asyncio.gather(*(host.end(grace_s) for host in self._hosts))

    def close(self) -> None:
        """End all children."""
        for host in self._hosts:
            host.close()

    def _opening(self, target: SinkTarget, fresh: bool, first_step: int) -> Opening:
        return Opening(
            kind=target.kind,
            target=target.target,
            run_id=self._run_id,
            directory=str(self._directory),
            fresh=fresh,
            first_step=first_step,
        )
