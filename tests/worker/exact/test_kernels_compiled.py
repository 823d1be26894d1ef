"""The kernels as code for GPUs that are not here: they compile, spill nothing, and read and write memory in vectors."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rackrun.worker.exact import fixed_point_triton
from rackrun.worker.tensors import device_digest_triton
from tests.variants import in_stories


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled here is kept nowhere."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


TARGETS = [GPUTarget("cuda", 90, 32), GPUTarget("cuda", 100, 32)]


def compiled(
    kernel: Any, target: GPUTarget, types: dict[str, str], constants: dict[str, Any], *, aligned: bool = True
) -> Any:
    """``types``: of the arguments that are not constants. ``aligned``: pointers are multiples of 16."""
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    pointers = [index for index, name in enumerate(names) if signature[name].startswith("*")]
    attributes = {(index,): [["tt.divisibility", 16]] for index in pointers if aligned}
    fixed = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=fixed, attrs=attributes)
    return triton.compile(source, target=target, options={"enable_fp_fusion": False})


def widths(code: Any, access: str) -> Counter[str]:
    """How global memory is read ("ld") or written ("st"): the instruction's form -> how often."""
    return Counter(re.findall(rf"{access}\.global\.([a-z0-9.:]+)", code.asm["ptx"]))


def is_vector(form: str) -> bool:
    return ".v2" in f".{form}" or ".v4" in f".{form}" or ".v8" in f".{form}"


@pytest.mark.parametrize("target", TARGETS, ids=lambda one: f"sm_{one.arch}")
def test_the_digest_reads_in_vectors(target: GPUTarget) -> None:
    """Whole blocks; the mask of a last block is of single words."""
    block = device_digest_triton._BLOCK
    types = {"table": "*i64", "factors": "*i64", "sums": "*i64"}
    code = compiled(device_digest_triton._sum_runs, target, types, {"BLOCK": block, "ALIGNED": True})
    assert bytes_in_vectors(code, "ld") >= block // _threads(code) * (4 + 8), widths(code, "ld")


@pytest.mark.parametrize("target", TARGETS, ids=lambda one: f"sm_{one.arch}")
@pytest.mark.parametrize("fresh", [True, *in_stories(False)])
@pytest.mark.parametrize(("values", "sums"), [("*fp32", "*i32"), ("*bf16", "*i32"), ("*fp16", "*i64")])
def test_a_bucket_is_read_and_written_in_vectors_wherever_its_parameters_begin(
    values: str, sums: str, fresh: bool, target: GPUTarget
) -> None:
    """All but the last block, whose mask is of single elements, and what is looked up for each parameter."""
    block = fixed_point_triton._BLOCK
    table = {"table": "*i64", "count": "i32"}
    code = compiled(
        fixed_point_triton._add_segments,
        target,
        {"values": values, "sums": sums, "scales": "*fp32", "largest": "*i32", **table},
        {"FRESH": fresh, "BLOCK": block},
    )
    read = compiled(
        fixed_point_triton._read_segments,
        target,
        {"sums": sums, "out": values, "inverses": "*fp32", "marks": sums, **table},
        {"BLOCK": block},
    )
    for one, loaded, stored in ((code, values, sums), (read, sums, values)):
        assert bytes_in_vectors(one, "ld") >= block // _threads(one) * _SIZES[loaded], widths(one, "ld")
        assert bytes_in_vectors(one, "st") >= block // _threads(one) * _SIZES[stored], widths(one, "st")
    if not fresh:
        assert bytes_in_vectors(code, "ld") >= block // _threads(code) * (_SIZES[values] + _SIZES[sums])


@pytest.mark.parametrize("target", TARGETS, ids=lambda one: f"sm_{one.arch}")
@pytest.mark.parametrize(("values", "sums"), [("*fp32", "*i32"), ("*bf16", "*i32"), ("*fp16", "*i64")])
def test_gradients_that_lie_apart_are_read_and_written_in_vectors(values: str, sums: str, target: GPUTarget) -> None:
    block, types = fixed_point_triton._BLOCK, {"*fp32": tl.float32, "*bf16": tl.bfloat16, "*fp16": tl.float16}
    code = compiled(
        fixed_point_triton._add_apart,
        target,
        {"addresses": "*i64", "table": "*i64", "scales": "*fp32", "largest": "*i32"},
        {"VALUE": types[values], "SUM": tl.int64 if sums == "*i64" else tl.int32, "FRESH": False, "ALIGNED": True},
    )
    own = block // _threads(code)
    assert bytes_in_vectors(code, "ld") >= own * (_SIZES[values] + _SIZES[sums]), widths(code, "ld")
    assert bytes_in_vectors(code, "st") >= own * _SIZES[sums], widths(code, "st")


_SIZES = {"*fp32": 4, "*i32": 4, "*bf16": 2, "*fp16": 2, "*i64": 8}


def _threads(code: Any) -> int:
    return int(32 * code.metadata.num_warps)


def bytes_in_vectors(code: Any, access: str) -> int:
    """What one thread reads or writes in vectors."""
    found = 0
    for form, often in widths(code, access).items():
        vector = re.search(r"v(\d)\.[bfsu](\d+)", form)
        if vector:
            found += often * int(vector[1]) * int(vector[2]) // 8
    return found
