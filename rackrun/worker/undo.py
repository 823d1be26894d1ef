"""What one unit may change before its gate, and how it is put back when the unit will not count.

Parameters and optimizers are not changed before the gate (`check_unchanged` sees to it), so they cost nothing here.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase

from rackrun.errors import StepError
from rackrun.worker.compat import ddp, fsdp, grads
from rackrun.worker.plain import flatten
from rackrun.worker.state import TrackedState

__all__ = ["Undo"]

_SMALL_BUFFER_BYTES = 2**20
_GRADS_LOOKED_AT = 3


class Undo:
    def __init__(self, state: TrackedState) -> None:
        self._state = state
        self._filled = -1
        self._saved: dict[str, _Saved] = {}
        """Buffers, and tensors of other tracked objects and of parameter groups, as they were when the unit began."""
        self._norm_buffers: set[str] | None = None
        self._saved_plain = b""
        self._submodules: list[nn.Module] = []
        self._modes: list[bool] = []
        self._versions: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self._grads_present: dict[int, bool] = {}
        self._grads_found: list[tuple[torch.Tensor, weakref.ref[torch.Tensor]]] = []
        self._cleared = -1
        self._stands: tuple[bytes, list[int], list[int], int] = b"", [], [], -1

    def committed(self) -> None:
        """A unit is over. Until the next one begins, nothing tracked may change: what a step does is all that is done again."""
        self._stands = self._state.encode_plain(), self.versions(), self._buffer_versions(), self._state.filled

    def check_stands(self) -> None:
        """Raises `StepError` when it has."""
        plain, versions, buffers, filled = self._stands
        if filled != self._state.filled or not versions:
            return
        changed = "a parameter" if versions != self.versions() else ""
        if not changed and buffers != self._buffer_versions():
            changed = "a buffer (by a forward in training mode, perhaps)"
        if changed or plain != self._state.encode_plain():
            raise StepError(
                f"{changed or 'tracked state (a scheduler, an optimizer setting, ...)'} was changed between two steps, where it is lost when a step is done again.",
                remedy="change tracked state inside the @run.step function (scheduler.step() after optimizer.step()), or in a phase.",
            )

    def begin(self) -> None:
        """Remember what forward and backward may change. Large constant buffers cost nothing: only changed ones are copied."""
        if self._filled != self._state.filled:
            self._filled = self._state.filled
            self._saved.clear()
        for wrapper in self._state.wrappers():
            ddp.begin(wrapper)
        for module in self._state.modules.values():
            fsdp.begin(module)
        for path, tensor in self._unstable():
            saved = self._saved.get(path)
            if saved is None or not saved.stands(tensor) or self._changes_unseen(path, tensor):
                self._saved[path] = _Saved(tensor)
        self._versions = [(weakref.ref(p), p._version) for p in self._state.parameters() if not isinstance(p, DTensor)]
        if not self._submodules:
            self._submodules = [module for root in self._state.modules.values() for module in root.modules()]
        self._modes = [module.training for module in self._submodules]
        self._saved_plain = self._state.encode_plain()
        self._grads_present = {id(p): p.grad is not None for p in self._state.parameters()}
        found = (p for p in self._state.parameters() if p.grad is not None)
        self._grads_found = [
            (p, weakref.ref(p.grad)) for p in itertools.islice(found, _GRADS_LOOKED_AT) if p.grad is not None
        ]

    def check_unchanged(self) -> None:
        """Before the first optimizer step of a unit: raises `StepError` when parameters are not those it began with."""
        for ref, version in self._versions:
            parameter = ref()
            if parameter is not None and parameter._version != version:
                raise StepError(
                    f"a parameter (shape {tuple(parameter.shape)}) was changed in a step before optimizer.step(), where it could not be put back.",
                    remedy="change parameters after optimizer.step().",
                )

    def versions(self) -> list[int]:
        """Of all parameters, this rank's part: equal as long as nothing was written to them."""
        parameters = self._state.parameters()
        return [(p._local_tensor if isinstance(p, DTensor) else p)._version for p in parameters]

    def _buffer_versions(self) -> list[int]:
        return [buffer._version for buffer in self._state.buffers().values()]

    def check_gradients(self) -> None:
        """Before the first optimizer step of a unit. Raises `StepError` when gradients of an older step are still in the sum: the
        unit could not be repeated, because nobody has kept them."""
        if grads.cleared() == self._cleared and any(
            parameter.grad is found() for parameter, found in self._grads_found
        ):
            raise StepError(
                "gradients of the step before were not cleared, so this step adds to them, and could not be repeated.",
                remedy="call optimizer.zero_grad() in every step; to accumulate, use smaller micro-batches of one global batch.",
            )
        self._cleared = grads.cleared()

    def discard(self, *, backward_open: bool) -> None:
        """Put back what the abandoned unit changed: gradients, buffers, scaler, scheduler, FSDP's and DDP's intermediate state.

        ``backward_open``: it was left before all of its backward passes had ended.
        """
        for module, training in zip(self._submodules, self._modes, strict=True):
            module.training = training
        with torch.no_grad():
            for module in self._state.modules.values():
                fsdp.reset(module)
            for wrapper in self._state.wrappers() if backward_open else ():
                ddp.reset(wrapper)
            for parameter in self._state.parameters():
                if parameter.grad is not None:
                    if self._grads_present.get(id(parameter)):
                        parameter.grad.zero_()
                    else:
                        parameter.grad = None
            changed = False
            for path, tensor in self._unstable():
                saved = self._saved.get(path)
                if saved is None or (saved.stands(tensor) and not self._changes_unseen(path, tensor)):
                    continue
                changed = True
                if saved.value.shape == tensor.shape:
                    tensor.copy_(saved.value)
                    self._saved[path] = _Saved(tensor, saved.value)
        for other in self._state.others.values():
            if hasattr(other, "_per_optimizer_states"):  # GradScaler keeps what it unscaled
                other._per_optimizer_states.clear()
        if changed or self._state.encode_plain() != self._saved_plain:
            self._state.put_plain(self._saved_plain, {path: saved.value.clone() for path, saved in self._saved.items()})

    def _changes_unseen(self, path: str, buffer: torch.Tensor) -> bool:
        """torch's batch norm writes its statistics without counting up their version; and who knows what a custom kernel does.
        Only large buffers (masks, tables) are believed to be what their version says."""
        if buffer.nbytes <= _SMALL_BUFFER_BYTES:
            return True
        path = path.removeprefix("buffer:")
        if self._norm_buffers is None:
            norms = [
                (f"{name}/{at}", sub) for name, root in self._state.modules.items() for at, sub in root.named_modules()
            ]
            self._norm_buffers = {
                f"{at}.{name}".replace("/.", "/")
                for at, sub in norms
                if isinstance(sub, _NormBase)
                for name, _ in sub.named_buffers()
            }
        return path in self._norm_buffers

    def _unstable(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What may change before the gate, other than parameters and gradients."""
        for path, buffer in self._state.buffers().items():
            yield f"buffer:{path}", buffer
        for name, optimizer in self._state.optimizers.items():
            for index, group in enumerate(optimizer.param_groups):
                for key, value in group.items():
                    if isinstance(value, torch.Tensor):
                        yield f"{name}/group/{index}/{key}", value
        for name, other in self._state.others.items():
            if not name.startswith("rackrun."):
                yield from flatten(f"{name}/state", other.state_dict()).items()


class _Saved:
    """A tensor, and what it was."""

    def __init__(self, tensor: torch.Tensor, value: torch.Tensor | None = None) -> None:
        self._tensor, self._version = tensor, tensor._version
        self.value = tensor.clone() if value is None else value

    def stands(self, tensor: torch.Tensor) -> bool:
        """As far as its version tells."""
        mine = self._tensor
        same = tensor.data_ptr() == mine.data_ptr() and tensor.shape == mine.shape and tensor.stride() == mine.stride()
        return same and tensor._version == self._version
