"""What torch does on devices beside the works of its collectives: waits by events, and memory that ranks share."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rackrun.worker.torch_compat import watch_waits

FSDP = {"__name__": "torch.distributed.fsdp._fully_shard._fsdp_param_group"}
OTHER = {"__name__": "train"}


@pytest.mark.parametrize(
    ("module", "current", "seen"),
    [
        (FSDP, True, ["before", "waits", "after"]),
        (FSDP, False, ["waits"]),
        (OTHER, True, ["waits"]),
    ],
)
def test_a_wait_that_fsdp_has_the_current_stream_do_is_seen(
    module: dict[str, Any], current: bool, seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        order.append("before")
        yield
        order.append("after")

    stream = SimpleNamespace(device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda.Stream, "wait_event", lambda *_: order.append("waits"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream if current else object())
    watch_waits(around)
    namespace = dict(module, stream=stream, Stream=torch.cuda.Stream)
    exec("Stream.wait_event(stream, 'event')", namespace)
    assert order == seen


ASKS = {
    "rendezvous": "symm.rendezvous(torch.ones(1), group)",
    "empty": "symm.empty(4, device='cpu')",
    "workspace": "symm.get_symm_mem_workspace(group.group_name, 64)",
    "group": "symm.enable_symm_mem_for_group(group.group_name)",
    "compiled": "torch._C._distributed_c10d._SymmetricMemory.empty_strided_p2p((4,), (1,), torch.float32, torch.device('cpu'), None)",
}

SCRIPT = """
import warnings; warnings.simplefilter("ignore")
import torch, torch.distributed as dist
import rackrun
from rackrun.worker.process.runtime import start
start()
import torch.distributed._symmetric_memory as symm
torch.cuda.is_current_stream_capturing = lambda: False
torch.cuda.current_device = lambda: 0
group = dist.group.WORLD
for ask in {asks!r}:
    try:
        exec(ask)
    except rackrun.UsageError as error:
        assert "symmetric memory" in str(error) and "Remedy" in str(error), error
    else:
        raise SystemExit(f"{{ask}} was not refused")
print("all refused")
"""


@pytest.mark.stories
def test_symmetric_memory_is_refused_wherever_it_is_asked_for() -> None:
    script = SCRIPT.format(asks=list(ASKS.values()))
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert ended.stdout.strip() == "all refused", ended.stderr[-2000:]
