"""Which parameters a script accesses through ``.data``, and whether it has written them so.

No version counter moves with such a write. It may also change nothing when it is done again (``p.data.clamp_``, a mask,
``fill_``), so comparing an attempt with the one before it does not find it either. So the first access to a parameter
in a unit, before its gate, keeps what the parameter was:

- as a copy, in the first units that access it, if there is room: a write is put back then;
- as a digest afterwards, unless the script has written any parameter so. Most scripts that access parameters in every
  step only read them (their norms, for a log).

At the gate the content is compared: a parameter that a script writes is known from then on, and copied when a unit
begins (`rackrun.worker.steps.undo.unit_undo`). Between two units an access keeps a digest, which is compared when the
next unit begins. The outcome of a comparison of digests is read when the host has waited for the device anyway.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from rackrun.worker.tensors.freed_tensors import is_freed
from rackrun.worker.tensors.readback import flags_to_host
from rackrun.worker.tensors.tensor_bytes import digests_to_come
from rackrun.worker.tensors.tensor_lists import local_parts, versions
from rackrun.worker.tensors.undo_copies import UndoCopies
from rackrun.worker.torch_compat import data_access

__all__ = ["DataAccesses"]

_COPIED_UNITS = 3
"""The number of units with an access in which a parameter is copied."""


class _Digested(NamedTuple):
    """Parameters of one device as they were at an access."""

    paths: list[str]
    digests: torch.Tensor
    """int64 of shape (len(paths),), on the device, which may not have come there yet."""


class _Compared(NamedTuple):
    """Which parameters differ from what they were."""

    paths: list[str]
    differ: torch.Tensor
    """bool of shape (len(paths),), on the host; to be read when the device has come there."""

    def differing(self) -> set[str]:
        differ = self.differ.tolist()
        return {path for path, differs in zip(self.paths, differ, strict=True) if differs}


class DataAccesses:
    """Accesses through ``.data`` since the current unit began, or since the last one ended.

    ``copies``: of the current unit. ``has_room``: returns whether the device has room for copies of all parameters.
    """

    def __init__(self, copies: UndoCopies, has_room: Callable[[], bool] = lambda: True) -> None:
        self._copies, self._has_room = copies, has_room
        self.settle: Callable[[], None] = lambda: None
        """Waits until no snapshot or checkpoint is being copied from the state any more."""
        self._parameters: Mapping[str, torch.Tensor] = {}
        self._places: dict[int, tuple[str, int]] = {}
        """``id`` of a parameter -> its path, and its place among all; made at the first access."""
        self._known: Collection[str] = ()
        """Paths of what is known to change: it is copied when a unit begins, and when a snapshot does."""
        self._versions: Sequence[int] = ()
        """The versions of all parameters when the unit began."""
        self._lock = threading.RLock()
        """Held while an access is noted, which may be in a thread of the script, and while watching begins or ends."""
        self._watches = self._in_unit = False
        self._stream: torch.cuda.Stream | None = None
        """The stream on which what is noted is compared and put back; None without GPUs."""
        self._settled = False
        self._room: bool | None = None
        self._accessed: set[str] = set()
        self._before: dict[bool, set[str]] = {}
        """What was accessed in the last unit (True) and between the last two (False)."""
        self._units: dict[str, int] = {}
        """Path -> number of committed units that have accessed it."""
        self._writes = False
        """Whether the script was seen to write any parameter so. Others may follow: a clamp changes a parameter for the
        first time when that leaves the range."""
        self._digested: list[_Digested] = []
        self._noted: set[str] = set()
        self._copied: set[str] = set()
        """The part of ``_noted`` of which there is a copy."""
        self._between: list[_Compared] = []
        """What was accessed between the last two units."""
        self._at_gate: list[_Compared] = []
        """What was digested in the current unit, compared at its gate."""

    def __contains__(self, path: str) -> bool:
        """Whether it is known what the parameter at ``path`` was at its first access in the current unit."""
        return path in self._noted

    def find(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Watch ``parameters``, which optimizers train, by path."""
        self._parameters, self._places = parameters, {}

    # -- when
    def begin_unit(self, at_begin: Sequence[int], known: Collection[str]) -> None:
        """Watch the unit that begins. ``at_begin``: the versions of all parameters. ``known``: paths of what is known
        to change."""
        with self._lock:
            self._begin(in_unit=True)
            self._versions, self._known = at_begin, known
            self._watch()

    def begin_between(self) -> None:
        """Watch the script's code between the unit that has ended and the next one."""
        with self._lock:
            self._begin(in_unit=False)
            self._known, self._between = (), []
            self._watch()

    def _begin(self, *, in_unit: bool) -> None:
        if self._accessed:
            self._before[self._in_unit], self._accessed = self._accessed, set()
        if self._noted:
            self._digested, self._at_gate, self._noted, self._copied = [], [], set(), set()
        self._in_unit, self._settled, self._room = in_unit, False, None
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def end(self) -> None:
        """Stop watching. What was noted is kept."""
        with self._lock:
            self._watches = False
            data_access.watch(None)

    def forget(self) -> None:
        """Stop watching, and forget what was noted."""
        self.end()
        self._begin(in_unit=False)
        self._between = []

    def _watch(self) -> None:
        """Watch from now on. What the script has read before and kept counts as accessed now."""
        for parameter in data_access.kept():
            self._access_by_id(parameter)
        self._watches = True
        data_access.watch(self._access)

    # -- an access
    def _access(self, parameter: torch.Tensor) -> None:
        """Note an access, in whichever thread, unless nothing is watched by the time that it can be noted."""
        with self._lock:
            if self._watches:
                self._access_by_id(id(parameter))

    def _access_by_id(self, parameter: int) -> None:
        if not self._places:
            self._places = {id(one): (path, at) for at, (path, one) in enumerate(self._parameters.items())}
        path, _ = self._places.get(parameter, ("", 0))
        if not path or path in self._noted:
            return
        if path in self._known:
            self._writes = True
            return
        self._accessed.add(path)
        stands = self._stands(path)
        if self._settled and not stands:
            return
        with data_access.outside_of_modes() as may_compute:
            if not may_compute:
                return
            if not self._settled:
                self._settled = True
                self.settle()
            if stands:
                expected = set() if self._noted else self._before.get(self._in_unit, set())
                self._note([path, *(one for one in expected if one != path and self._stands(one))])

    def _stands(self, path: str) -> bool:
        """Whether there is no copy of the parameter, and its version has not moved: a version that has is proof
        enough."""
        if not self._in_unit:
            return True
        parameter = self._parameters.get(path)
        if parameter is None or self._copies.is_fresh(path):
            return False
        return versions([parameter])[0] == self._versions[self._places[id(parameter)][1]]

    def _note(self, paths: Iterable[str]) -> None:
        """Keep what the parameters at ``paths`` are. What was accessed in the unit before is noted together, because
        one call for many costs little more."""
        tensors = {path: tensor for path, tensor in self._tensors(paths).items() if not is_freed(tensor)}
        copied = {path: tensor for path, tensor in tensors.items() if self._is_copied(path)}
        self._copies.take(copied)
        self._copied.update(copied)
        self._noted.update(tensors)
        for some in _by_device({path: tensor for path, tensor in tensors.items() if path not in copied}):
            self._digested.append(_Digested(list(some), digests_to_come(list(some.values()))))
        self._let_stream_wait()

    def _let_stream_wait(self) -> None:
        """Let what was noted on another stream of the script (a moving average beside the step) come first."""
        if self._stream is None or (now := torch.cuda.current_stream()) == self._stream:
            return
        self._stream.wait_stream(now)
        for digested in self._digested:
            if digested.digests.is_cuda:
                digested.digests.record_stream(self._stream)

    def _is_copied(self, path: str) -> bool:
        if not self._in_unit or (self._units.get(path, 0) >= _COPIED_UNITS and not self._writes):
            return False
        if self._room is None:
            self._room = self._has_room()
        return self._room

    # -- what came of it
    def changed(self) -> set[str]:
        """Return the paths of parameters that have changed since their first access in the unit, or between units, and
        of which there is no copy. Waits for the device."""
        with self._lock:
            return _differing([self._compare(digested) for digested in self._digested])

    def changed_early(self) -> set[str]:
        """Return the paths of copied parameters that have changed since their first access in the unit, at its gate.
        `changed_early_too` returns the others, when the device has come there."""
        self.end()
        for path in self._accessed:
            self._units[path] = self._units.get(path, 0) + 1
        self._at_gate = [self._compare(digested) for digested in self._digested]
        now = self._tensors(self._copied) if self._copied else {}
        early = {path for path, tensor in now.items() if not self._copies.equals(path, tensor)}
        self._writes |= bool(early)
        return early

    def changed_early_too(self) -> set[str]:
        """Return the paths of the parameters that `changed_early` has compared by digests, and that had changed."""
        early = _differing(self._at_gate)
        self._writes |= bool(early)
        return early

    def compare_between(self) -> None:
        """Compare what was accessed between two units with what it is now, as the next unit begins. `changed_between`
        has the outcome."""
        self._between = [] if self._in_unit else [self._compare(digested) for digested in self._digested]
        self._digested = []

    def changed_between(self) -> str:
        """Return the path of a parameter that `compare_between` has found changed; "" for none. To be called when the
        device has come there."""
        return min(_differing(self._between), default="")

    def _compare(self, digested: _Digested) -> _Compared:
        differ = digested.digests != self._digests_now(digested)
        return _Compared(digested.paths, flags_to_host(differ))

    def _digests_now(self, digested: _Digested) -> torch.Tensor:
        with data_access.outside_of_modes():
            now = list(self._tensors(digested.paths).values())
            if any(map(is_freed, now)) or len(now) < len(digested.paths):
                return ~digested.digests
            return digests_to_come(now).to(digested.digests.device)

    def _tensors(self, paths: Iterable[str]) -> dict[str, torch.Tensor]:
        there = {path: self._parameters[path] for path in paths if path in self._parameters}
        return dict(zip(there, local_parts(there.values()), strict=True))


def _differing(compared: Iterable[_Compared]) -> set[str]:
    found: set[str] = set()
    return found.union(*(one.differing() for one in compared))


def _by_device(tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    for device in dict.fromkeys(tensor.device for tensor in tensors.values()):
        yield {path: tensor for path, tensor in tensors.items() if tensor.device == device}
