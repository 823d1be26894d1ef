"""What the kit's scripts share: the record that they write, the strikes at themselves, and the double of NCCL's contract in a dry run."""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import importlib.util
import json
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Record", "Strikes", "digest_of", "doubled", "local", "numbers", "show_stacks_in_time", "sleep_on_device"]

DOUBLE = "RACKRUN_NCCL_DOUBLE"
"""As for the workers' tests: ``late`` or ``stuck``."""
SPARES_READY = "spares-ready"
"""A file among the flags of a job."""
DOUBLE_AT = Path(__file__).resolve().parents[3] / "tests" / "worker" / "nccl_double.py"


def show_stacks_in_time() -> None:
    """Before the check that we belong to is killed."""
    deadline = os.environ.get("RACKRUN_KIT_DEADLINE")
    if deadline is not None and (left_s := float(deadline) - time.monotonic() - 5) > 0:
        faulthandler.dump_traceback_later(left_s, exit=False)


def doubled() -> contextlib.AbstractContextManager[Any]:
    """In which a script's main runs: collectives as NCCL's where this process was told to have them so."""
    mode = os.environ.get(DOUBLE)
    if not mode:
        return contextlib.nullcontext()
    spec = importlib.util.spec_from_file_location("nccl_double", DOUBLE_AT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    held: contextlib.AbstractContextManager[Any] = module.install(mode)
    return held


class Record:
    """One line of JSON for each thing that happens, appended with a single write: lines of several ranks never mix."""

    def __init__(self, path: str | Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, what: str, **values: Any) -> None:
        line = {"what": what, "t": time.monotonic(), "pid": os.getpid(), **values}
        os.write(self._fd, json.dumps(line).encode() + b"\n")


class Strikes:
    """What this process does to itself: a list of ``{"rank", "step", "place", "what", "after"}``.

    ``place``: begin, forward, backward, update, done, phase or give. ``what``: kill, stop, or hang (the device sleeps for a minute). ``after``: the number of another strike that must have been done
    before. Each is done once, by whichever process comes there first.
    """

    def __init__(self, given: str, flags: Path) -> None:
        self._strikes: list[dict[str, Any]] = json.loads(given)
        self._flags = flags

    def at(self, place: str, rank: int, step: int, record: Record) -> None:
        for number, one in enumerate(self._strikes):
            here = one["place"] == place and one["rank"] == rank and step >= one["step"]
            after = one.get("after")
            if here and (after is None or self._flag(after).exists()) and self._take(number):
                record.write("strike", number=number, rank=rank, step=step, place=place, did=one["what"])
                if one["what"] == "hang":
                    sleep_on_device(60.0)
                else:
                    os.kill(os.getpid(), signal.SIGSTOP if one["what"] == "stop" else signal.SIGKILL)

    def has(self, place: str) -> bool:
        return any(one["place"] == place for one in self._strikes)

    def wait_for_spares(self) -> None:
        """Called between two steps, where nobody waits for this rank: a spare that is still starting would not take over who is struck."""
        deadline = float(os.environ.get("RACKRUN_KIT_DEADLINE", "inf"))
        while self._strikes and not (self._flags / SPARES_READY).exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _take(self, number: int) -> bool:
        try:
            os.close(os.open(self._flag(number), os.O_CREAT | os.O_EXCL, 0o644))
        except FileExistsError:
            return False
        return True

    def _flag(self, number: int) -> Path:
        return self._flags / f"strike-{number}"


_CYCLES_A_SECOND = 1.5e9
"""GPUs of this kind run at 1.0 to 2.0 GHz."""


def sleep_on_device(seconds: float) -> None:
    """The host goes on; what is enqueued from here on has to wait."""
    import torch

    torch.cuda._sleep(int(seconds * _CYCLES_A_SECOND))


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.detach()


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Of all bits, on the host, by nothing of rackrun's own."""
    import torch

    sums = hashlib.sha256()
    for tensor in tensors:
        part = local(tensor).contiguous().reshape(-1).view(torch.uint8)
        sums.update(part.cpu().numpy().tobytes())
    return sums.hexdigest()


def numbers(tensor: Tensor) -> list[int]:
    return [int(one) for one in tensor.flatten().tolist()]
