"""Every thread that may touch a device says first which one: else CUDA makes a context on the first GPU, which is another rank's."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rackrun
import rackrun.checkpoint
from rackrun.checkpoint.host_memory import device_threads as device_module
from rackrun.checkpoint.host_memory.device_threads import use_device

_WORKER = Path(rackrun.__file__).parent / "worker"
_CHECKPOINT = Path(rackrun.checkpoint.__file__).parent

FIRST = {
    ("checkpoint/host_memory/background_pinning.py", "self._register"): "_register",
    ("worker/membership/communicator_builder.py", "Builder"): "run",
    ("worker/membership/communicator_builder.py", "self._try"): "_try",
    ("worker/process/control_thread.py", "ControlThread"): "run",
    ("worker/device/device_return.py", "self._synchronise"): "_synchronise",
    ("worker/communicators/nccl.py", "connect"): "connect",
    ("worker/communicators/nccl.py", "self._end"): "_end",
    ("worker/communicators/nccl_warmup.py", "_warm"): "_warm",
    ("worker/communicators/on_demand.py", "self._build_part"): "_build_part",
    ("worker/restore/refill.py", "pool"): "",
    ("worker/membership/worker_membership.py", "_drop"): "_drop",
    ("worker/membership/worker_membership.py", "run"): "run",
}
"""What a thread runs -> the function that says it in its first lines; "": the pool itself does."""

BY_COPIES = {
    ("checkpoint/manager/saver.py", "work"): "host_copies.py",
    ("worker/snapshots/durable_checkpoints.py", "flush"): "host_copies.py",
    ("worker/snapshots/shard_snapshots.py", "self._copy"): "host_copies.py",
}
"""It touches the device by a copy only, and that says it."""

ON_HOST = {
    ("checkpoint/arena/arena_slot.py", "pool"): "memory of the host",
    ("checkpoint/base/digest.py", "pool"): "memory of the host",
    ("checkpoint/base/digest.py", "self._digest"): "memory of the host",
    ("checkpoint/image/safetensors_image.py", "pool"): "pieces whose tensors lie on the host",
    ("checkpoint/durable/lease.py", "self._renew"): "files",
    ("checkpoint/redundancy/erasure_code.py", "pool"): "memory of the host",
    ("checkpoint/host_memory/populate.py", "work"): "memory of the host",
    ("worker/torch_compat/dataloader_workers.py", "_until_told"): "a process of a loader, which has no device",
    ("worker/snapshots/durable_checkpoints.py", "bar"): "files",
    ("worker/snapshots/durable_checkpoints.py", "self._is_complete"): "files",
    ("worker/snapshots/durable_checkpoints.py", "self._probation.confirm"): "files",
    ("worker/communicators/on_demand.py", "partial(_tell, futures)"): "futures",
    ("worker/restore/live_restore.py", "pool"): "from memory of the host to memory of the host",
    ("worker/snapshots/snapshot_memory.py", "make"): "memory of the host; it is pinned in another thread",
    ("worker/tensors/tensor_bytes.py", "pool"): "tensors of the host",
}
"""It touches none."""


@functools.cache
def sources() -> dict[str, ast.Module]:
    return {
        f"{name}/{path.relative_to(folder)}": ast.parse(path.read_text())
        for folder, name in ((_WORKER, "worker"), (_CHECKPOINT, "checkpoint"))
        for path in sorted(folder.rglob("*.py"))
    }


def threads(tree: ast.Module) -> Iterator[str]:
    """What they run: an expression, the name of a class, or "pool"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any("Thread" in ast.unparse(base) for base in node.bases):
            yield node.name
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called == "threading.Thread":
                yield next(ast.unparse(word.value) for word in node.keywords if word.arg == "target")
            elif called.endswith("ThreadPoolExecutor"):
                yield "pool"


def test_every_thread_is_known_here() -> None:
    """A new one belongs into one of the tables."""
    found = {(path, what) for path, tree in sources().items() for what in threads(tree)}
    assert found == FIRST.keys() | BY_COPIES.keys() | ON_HOST.keys()


@pytest.mark.parametrize(("place", "function"), FIRST.items(), ids=str)
def test_a_thread_says_its_device_before_anything_else(place: tuple[str, str], function: str) -> None:
    path, _ = place
    tree = sources()[path]
    if not function:
        pools = [
            node for node in ast.walk(tree) if isinstance(node, ast.Call) and "ThreadPool" in ast.unparse(node.func)
        ]
        given = [[*pool.args, *(word.value for word in pool.keywords)] for pool in pools]
        assert all(any(ast.unparse(one) == "use_device" for one in arguments) for arguments in given)
        return
    bodies = [
        "\n".join(ast.unparse(line) for line in node.body[:2])
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == function
    ]
    says = ("use_device(", "queue.use()", "set_device(")
    assert bodies
    assert any(any(one in body for one in says) for body in bodies), bodies


@pytest.mark.parametrize(("place", "module"), BY_COPIES.items(), ids=str)
def test_a_copy_says_its_device_before_it_begins(place: tuple[str, str], module: str) -> None:
    tree = next(tree for path, tree in sources().items() if path.endswith(f"/{module}"))
    copies = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "copy" and "wait_event" in ast.unparse(node)
    ]
    assert copies, place
    assert all(text.index("use_device(") < text.index("torch.cuda.stream(") for text in copies)


def test_a_thread_of_a_gpu_sets_it_and_keeps_out_of_what_others_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)

    def exchange(mode: Any) -> int:
        calls.append(mode._obj.value)
        return 0

    runtime = SimpleNamespace(cudaThreadExchangeStreamCaptureMode=exchange)
    monkeypatch.setattr(device_module, "loaded_library", lambda _: runtime)
    use_device(torch.device("cpu"))
    assert calls == []
    use_device(torch.device("cuda", 1))
    assert calls == [torch.device("cuda", 1), 1]
