"""Where the workers' code makes the host wait for a device, or writes the environment: each place is known, with its reason.

A read of a tensor's value (``item()``, ``tolist()``, ``cpu()`` and their like) waits until the device has come there. A step has one
wait, at its gate. Whoever adds a read finds this test failing, and says here why it costs no step anything; or does it otherwise.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rackrun
from rackrun.worker.loop.run import Run
from tests.worker.harness import Ended, say
from tests.worker.scripts import adam, ddp, fit

ROOT = Path(rackrun.__file__).parent
READS = {"item", "tolist", "cpu", "numpy", "nonzero", "synchronize", "is_nonzero", "equal"}

HOST = "of what is on the host"
RARE = "not in an undisturbed step: at the start, in a recovery, or where content is audited"
EXACT = 'in a step with reduction="exact", which has more waits than one'
ALLOWED = {
    "data/global_batch.py check_rule": RARE,
    "communicators/setup_broadcasts.py _bytes_of": RARE,
    "torch_compat/data_parallel/fsdp.py promote_sharded": RARE,
    "torch_compat/feature_probe.py _going_back_of_fsdp": RARE,
    "torch_compat/feature_probe.py _local": RARE,
    "torch_compat/feature_probe.py _sums_of_fsdp": RARE,
    "torch_compat/feature_probe.py _sums_of_fsdp.decode": RARE,
    "integrity/silent_corruption.py CorruptionCheck._gather": RARE,
    "data/loader.py _Fetch._get": HOST,
    "data/stream_states.py _bytes_of": HOST,
    "membership/elastic_group.py ElasticGroup.gather_bytes": HOST,
    "data/dataset_generators.py state_of": HOST,
    "tensors/device_digest_triton.py load": RARE,
    "device/device_queue.py _CudaQueue.synchronise": RARE,
    "exact/exact_reduction.py ExactReduction._add": EXACT,
    "exact/exact_reduction.py ExactReduction._read": EXACT,
    "exact/exact_reduction.py ExactReduction.settle": EXACT,
    "membership/elastic_group.py ElasticGroup.largest": EXACT,
    "exact/exactly_once.py ExactlyOnce.check_complete": HOST,
    "exact/fixed_point.py _InChunks.add": HOST,
    "exact/fixed_point.py _InChunks.read_segments": HOST,
    "exact/fixed_point.py FixedPoint.add_apart": EXACT,
    "exact/fixed_point_triton.py load": RARE,
    "state/objects/tracked_generators.py _OfNumpy.state_dict": HOST,
    "state/objects/tracked_generators.py _OfOldNumpy.state_dict": HOST,
    "state/objects/tracked_generators.py _OfTorch.load_state_dict": RARE,
    "restore/process_vm.py PeerProcess.__init__": HOST,
    "communicators/nccl_warmup.py _OneRankNccl.use": "in a thread of its own, of a spare",
    "loop/pause.py WorkerPause.hold": RARE,
    "tensors/readback.py Readback.__init__": HOST,
    "tensors/readback.py Readback.value": HOST,
    "loop/join_generation.py _most": RARE,
    "integrity/replicas.py ReplicaCheck._gather": RARE,
    "restore/live_restore.py _receive": RARE,
    "restore/live_restore.py _verify": RARE,
    "snapshots/resumption.py Resumption._gather": RARE,
    "snapshots/resumption.py Resumption._gather_rows": RARE,
    "exact/fixed_point_scales.py fit": HOST,
    "tensors/tensor_bytes.py _checksum": HOST,
    "tensors/tensor_bytes.py _of_device": RARE,
    "steps/undo/data_accesses.py _Compared.differing": HOST,
    "tensors/undo_copies.py same_bits": RARE,
    "integrity/unshared_buffers.py UniqueBuffers.committed": "where replicas have buffers of their own: what has changed them after the gate is known before the next unit",
    "script/untracked_changes.py _sample": RARE,
    "membership/worker_membership.py WorkerMembership._sum": HOST,
}

STARTS = "before torch or a thread reads it"
ENVIRONMENT = {"torch_compat/feature_probe.py _world_of_one": STARTS, "process/runtime.py _share_gpu": STARTS}


@functools.cache
def trees() -> dict[str, ast.Module]:
    worker = ROOT / "worker"
    return {str(path.relative_to(worker)): ast.parse(path.read_text()) for path in sorted(worker.rglob("*.py"))}


def places(wanted: Callable[[ast.AST], bool]) -> set[str]:
    """The file, and the function in it, of every node that is wanted."""
    return {
        f"{file} {'.'.join(inside)}"
        for file, tree in trees().items()
        for node, inside in nodes(tree, ())
        if wanted(node)
    }


def nodes(node: ast.AST, inside: tuple[str, ...]) -> Iterator[tuple[ast.AST, tuple[str, ...]]]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        inside = (*inside, node.name)
    yield node, inside
    for child in ast.iter_child_nodes(node):
        yield from nodes(child, inside)


def reads(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READS


def writes_environment(node: ast.AST) -> bool:
    """``os.environ[...] = ...`` and the calls that are the same."""
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.Delete)):
        targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
        return any(isinstance(one, ast.Subscript) and ast.unparse(one.value) == "os.environ" for one in targets)
    changes = {"os.environ.update", "os.environ.setdefault", "os.environ.pop", "os.putenv", "os.unsetenv"}
    return isinstance(node, ast.Call) and ast.unparse(node.func) in changes


def test_every_read_of_a_tensors_value_is_known() -> None:
    found = places(reads)
    assert "tensors/readback.py Readback.value" in found
    assert found - ALLOWED.keys() == set(), "a read that makes the host wait for the device, in each step perhaps"


def test_the_environment_is_written_at_the_start_alone() -> None:
    """``setenv`` beside a ``getenv`` of another thread's is undefined behaviour, and libraries read it at any time."""
    found = places(writes_environment)
    assert "process/runtime.py _share_gpu" in found
    assert found - ENVIRONMENT.keys() == set()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("x.sum().item()", reads),
        ("torch.equal(a, b)", reads),
        ("os.environ['A'] = '1'", writes_environment),
        ("os.environ.setdefault('A', '1')", writes_environment),
    ],
)
def test_what_is_looked_for_is_found(text: str, wanted: Callable[[ast.AST], bool]) -> None:
    assert any(wanted(node) for node, _ in nodes(ast.parse(text), ()))
    assert not any(wanted(node) for node, _ in nodes(ast.parse("os.environ.get('A'); x.sum(); Threads(2)"), ()))


# -- and in a step that runs
def replicated(run: Run) -> nn.Module:
    return ddp(run)


def with_norms(run: Run) -> nn.Module:
    return ddp(run, nn.BatchNorm1d(14))


@pytest.mark.parametrize(
    ("make", "more"),
    [(replicated, set[str]()), (with_norms, {"integrity/unshared_buffers.py UniqueBuffers.committed"})],
)
def test_a_step_reads_what_its_gate_needs_and_nothing_else(
    make: Callable[[Run], nn.Module], more: set[str], train: Callable[..., Ended]
) -> None:
    """The loss of this rank, behind the one wait for the device, and the sums, which are on the host."""

    def main(run: Run) -> None:
        found, originals = Counter[str](), dict[tuple[Any, str], Any]()
        names = [(torch.Tensor, name) for name in (*READS, "__float__", "__int__", "__bool__", "__index__")]

        def noted(original: Any) -> Any:
            def read(*args: Any, **kwargs: Any) -> Any:
                caller = sys._getframe(1)
                path = Path(caller.f_code.co_filename)
                if path.is_relative_to(ROOT / "worker"):
                    found[f"{path.relative_to(ROOT / 'worker')} {caller.f_code.co_qualname}"] += 1
                return original(*args, **kwargs)

            return read

        def watch(number: int) -> None:
            if number != 5 or not run.is_main:
                return
            for owner, name in [*[one for one in names if hasattr(*one)], (torch, "equal")]:
                originals[owner, name] = getattr(owner, name)
                setattr(owner, name, noted(originals[owner, name]))

        def rest(number: int) -> None:
            for (owner, name), original in originals.items():
                setattr(owner, name, original)
            originals.clear()

        model = make(run)
        fit(run, model, adam(model), steps=7, before=watch, between=rest)
        say(found=dict(found))

    ended = train(main, ranks=2, spares=0, batch=(4, 2))
    assert ended.exit_code == 0, ended
    assert ended.said[0]["found"] == dict.fromkeys({"tensors/readback.py Readback.__init__", *more}, 1)
