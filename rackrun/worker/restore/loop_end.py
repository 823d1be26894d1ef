"""The state as the loop over ``run.steps()`` left it: what a newcomer begins the code after the loop with.

That code is the script's own. It may load the best weights, merge adapters, or switch to evaluation, and who takes a rank over runs all of it
again. So a newcomer is given what the others had when they began it, not what they have by now.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec
import torch

from rackrun.errors import StepError
from rackrun.worker.membership.worker_membership import lost_after_loop
from rackrun.worker.state.state_manifest import Manifest
from rackrun.worker.state.tracked_state import TrackedState
from rackrun.worker.tensors.freed_tensors import refuse_freed
from rackrun.worker.tensors.tensor_bytes import digests_by_path
from rackrun.worker.tensors.undo_copies import NoRoom, UndoCopies, place_for
from rackrun.worker.torch_compat.data_parallel import fsdp

__all__ = ["LoopEnd", "Source"]


class Source(Protocol):
    """What a newcomer is given: the state as it is, or as it was."""

    def manifest(self, replica_class: str) -> Manifest: ...

    def tensors(self) -> Mapping[str, torch.Tensor]: ...


class LoopEnd:
    """Everything tracked is copied when the loop is over, where there is memory for it. Else it is digested: a change is noticed, and cannot be
    taken back."""

    def __init__(self, state: TrackedState) -> None:
        self._state = state
        self._manifest: Manifest | None = None
        self._copies = UndoCopies()
        self._digests: dict[str, int] = {}
        self._freed: StepError | None = None
        """There was something that could not be copied."""
        self._lost = ""
        """Something that had been changed before there was a copy of it."""
        self._left: dict[str, int] = {}
        """What the code after the loop has made of it, where phases follow that code."""

    def reached(self, changed: str = "") -> None:
        """The script's own code begins. ``changed``: it ran before, unseen, and has changed this. Nothing is raised for what cannot be copied: an
        exception of the script's may be on its way through the loop, which is to be told. `refuse_freed` follows where there is none."""
        self._lost = changed
        # An exception in a forward leaves whole parameters where the shards belong, and FSDP2 does not reshard them in what it takes for a forward.
        fsdp.begin(self._state.structure().fsdp)
        tensors = self._state.tensors()
        try:
            refuse_freed(tensors)
        except StepError as error:
            self._freed = error
            return
        try:
            place = place_for(sum(tensor.nbytes for tensor in tensors.values()), self._state.device)
        except NoRoom:
            self._digests = digests_by_path(tensors)
        else:
            self._copies.take(tensors, place)
        self._manifest = self._state.manifest("")

    def refuse_freed(self) -> None:
        """The script has left its loop, and no exception came of it. Raises `StepError` when it has freed tracked memory."""
        if self._freed is not None:
            raise self._freed

    def left(self) -> None:
        """Phases follow the script's own code. What they change is part of the training, and there is nobody who has it without that code."""
        if self._manifest is not None:
            self._left = digests_by_path(self._state.tensors())

    def check(self) -> None:
        """Before newcomers are given what the loop left. Raises `CollectiveBroken` where nobody has that any more, or it is not all that they need."""
        changed = self.changed()
        if changed and (self._lost or self._digests):
            raise lost_after_loop(f" This rank had changed {changed} there.")
        if self._left and self._left != digests_by_path(self._state.tensors()):
            raise lost_after_loop(" A phase that followed it has changed tracked state.")

    def put_back(self) -> bool:
        """Make the state again what the loop left. False: that cannot be done."""
        if not self.changed():
            return True
        if self._lost or self._digests or self._left:
            return False
        assert self._manifest is not None
        tensors = self._state.tensors()
        if tensors.keys() != set(self._copies):
            return False
        if not all(self._copies.put_back(path, tensor) for path, tensor in tensors.items()):
            return False
        self._state.load_plain(self._manifest, tensors)
        return True

    def source(self) -> Source:
        """After `check`: what a newcomer is to be given."""
        if self._manifest is None:
            return self._state
        tensors = self._state.tensors()
        if not self._digests:
            tensors = {path: self._copies.value(path) for path in self._copies}
        lineage = self._state.lineage
        return _Kept(msgspec.structs.replace(self._manifest, lineage=lineage), tensors)

    def changed(self) -> str:
        """The path of something tracked that is not what the loop left. "": nothing, or the loop is not over."""
        if self._manifest is None:
            return ""
        if self._lost:
            return self._lost
        tensors = self._state.tensors()
        known = self._digests.keys() if self._digests else set(self._copies)
        if odd := tensors.keys() ^ known:
            return min(odd)
        if self._digests:
            changed = [path for path, digest in digests_by_path(tensors).items() if digest != self._digests[path]]
        else:
            changed = [path for path, tensor in tensors.items() if not self._copies.equals(path, tensor)]
        if changed:
            return changed[0]
        return "" if self._state.encode_plain() == self._manifest.plain else "a tracked object"


class _Kept:
    def __init__(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
        self._manifest, self._tensors = manifest, tensors

    def manifest(self, replica_class: str) -> Manifest:
        return msgspec.structs.replace(self._manifest, replica_class=replica_class)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._tensors
