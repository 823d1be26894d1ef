"""Gradients as fixed-point integers: whoever computes them gets the same bits."""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rackrun.worker.exact import fixed_point_c
from rackrun.worker.exact.fixed_point import FixedPoint, Whole, fixed_point
from rackrun.worker.exact.parameter_segments import Factors, Segments


def plain() -> FixedPoint:
    arithmetic = fixed_point(torch.device("cpu"))
    arithmetic._kernel = None  # type: ignore[attr-defined]
    return arithmetic


def of_a_gpu() -> FixedPoint:
    """What torch's operations do there, where there is no kernel: they do it anywhere."""
    return Whole()


@pytest.mark.parametrize("size", [0, 1, 63, 64, 2**16 + 7])
def test_the_compiled_kernel_computes_the_same_bits(size: int) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 3
    values[: size // 2] *= 2.0**-20
    found = []
    for arithmetic in (plain(), fixed_point(torch.device("cpu")), of_a_gpu()):
        sums, back = torch.full((size,), 99, dtype=torch.int32), torch.empty(size)
        largest = [float(arithmetic.add(values, 2.0**22, sums, fresh=fresh)) for fresh in (True, False)]
        arithmetic.read(sums, 2.0**-22, back)
        in_place = values.clone()
        largest.append(float(arithmetic.add(in_place, 2.0**22, in_place.view(torch.int32), fresh=True)))
        found.append((largest, sums.tolist(), back.tolist(), in_place.view(torch.int32).tolist()))
    assert found[0] == found[1] == found[2]
    assert found[0][0] == [float(values.abs().max()) if size else 0.0] * 3


@pytest.fixture
def anew() -> Iterator[None]:
    fixed_point_c.load.cache_clear()
    yield
    fixed_point_c.load.cache_clear()


@pytest.mark.usefixtures("anew")
def test_a_rank_that_is_killed_while_it_compiles_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "mkdtemp", lambda *_, **__: pytest.fail("a folder is made"))
    assert fixed_point_c.load() is not None


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize("works", [True, False])
def test_a_linker_that_writes_into_folders_alone_gets_one(
    works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "cc"
    real = f'exec {shutil.which("gcc")} "$@"' if works else "exit 1"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in */proc/*) exit 1;; esac\n{real}\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert (fixed_point_c.load() is not None) is works


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_gradients_of_any_precision_keep_their_bits_down_to_the_scale(
    dtype: torch.dtype, integers: torch.dtype
) -> None:
    values = (torch.arange(-300, 300) * 2.0**-6).to(dtype)
    sums, back = torch.empty(600, dtype=integers), torch.empty(600, dtype=dtype)
    arithmetic = fixed_point(torch.device("cpu"))
    assert arithmetic.add(values, 2.0**16, sums, fresh=True) == float(values.abs().max())
    arithmetic.read(sums, 2.0**-16, back)
    assert torch.equal(back, values)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_value_that_is_not_finite_is_seen(bad: float) -> None:
    values = torch.ones(200)
    values[77] = bad
    for arithmetic in (plain(), fixed_point(torch.device("cpu")), of_a_gpu()):
        assert arithmetic.add(values, 1.0, torch.empty(200, dtype=torch.int32), fresh=True) == math.inf


INTERPRETED = """
import math, torch
from rackrun.worker.exact import fixed_point_triton
from rackrun.worker.exact import fixed_point_c as fixed_point_kernel
from rackrun.worker.exact.fixed_point import Whole, fixed_point
from rackrun.worker.exact.parameter_segments import Factors, Segments

reference = fixed_point(torch.device("cpu"))
kernel = fixed_point_triton.load(torch.device("cpu"), Whole())
assert kernel is not None
up, down = Factors.all_of(torch.device("cpu"), [2.0**20], [2.0**-20])
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for integers in (torch.int32, torch.int64):
        for size in (0, 1, 2047, 4500):
            values = (torch.randn(size, generator=torch.Generator().manual_seed(size)) * 3).to(dtype)
            values[: size // 2] *= 2.0**-9
            found, one = [], Segments((0,), (size,))
            for arithmetic in (reference, kernel):
                sums, back = torch.full((size,), 99, dtype=integers), torch.empty(size, dtype=dtype)
                largest = torch.zeros(1)
                for fresh in (True, False):
                    arithmetic.add_segments(values, one, up, sums, largest, fresh=fresh)
                arithmetic.read_segments(sums, one, down, torch.zeros(1, dtype=integers), back)
                found.append((largest.tolist(), sums.tolist(), back.tolist()))
            assert found[0] == found[1], (dtype, integers, size)
sizes = (1, 0, 63, 2048, 5, 2043, 7000, 1, 1, 3)
slots = (4, 0, 7, 1, 9, 2, 3, 8, 5, 6)
segments = Segments(slots, sizes)
scales = [2.0 ** (slot + 8) for slot in range(10)]
scale, inverse = Factors.all_of(torch.device("cpu"), scales, [1 / one for one in scales])
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for integers in (torch.int32, torch.int64):
        values = (torch.randn(sum(sizes), generator=torch.Generator().manual_seed(5)) * 3).to(dtype)
        values[70] = math.nan
        marks = torch.tensor([0, 0, 2, 0, 0, 1, 0, 0, 0, 0], dtype=integers)
        found = []
        for arithmetic in (reference, Whole(), kernel):
            largest = torch.full((10,), 0.5)
            sums, back = torch.full((sum(sizes),), 99, dtype=integers), torch.empty(sum(sizes), dtype=dtype)
            for fresh in (True, False):
                arithmetic.add_segments(values, segments, scale, sums, largest, fresh=fresh)
            arithmetic.read_segments(sums, segments, inverse, marks, back)
            sums[70] = 0  # of NaN there is no integer
            back = back.float().nan_to_num(123.0)
            found.append((largest.tolist(), sums.tolist(), back.tolist()))
        assert found[0] == found[1] == found[2], (dtype, integers)
        whole = found[0]
        assert whole[0][1] == math.inf
        parts = [part for _, part in segments.parts()]
        for offset in (0, 1):  # the second: in memory that is no multiple of 16
            found = []
            for arithmetic in (reference, kernel):
                largest = torch.full((10,), 0.5)
                memory = [torch.empty(size + offset, dtype=integers) for size in sizes]
                apart = [values[part].clone() for part in parts], [one[offset:] for one in memory]
                for fresh in (True, False):
                    arithmetic.add_apart(apart[0], segments, scale, apart[1], largest, fresh=fresh)
                sums = torch.cat(apart[1])
                sums[70] = 0
                found.append((largest.tolist(), sums.tolist()))
            assert found[0] == found[1] == (whole[0], whole[1]), (dtype, integers, offset)
        own = torch.empty(2048, dtype=integers)
        reference.add(values[64:2112], scales[1], own, fresh=True)
        assert whole[1][100] == 2 * int(own[36])
values = torch.randn(5000)
apart = torch.empty(5000, dtype=torch.int32)
halves = Segments((0, 1), (2500, 2500))
both, back = Factors.all_of(torch.device("cpu"), [2.0**20] * 2, [2.0**-20] * 2)
as_one = values.clone()
kernel.add_segments(values, halves, both, apart, torch.zeros(2), fresh=True)
kernel.add_segments(as_one, halves, both, as_one.view(torch.int32), torch.zeros(2), fresh=True)
assert torch.equal(as_one.view(torch.int32), apart)
kernel.read_segments(as_one.view(torch.int32), halves, back, torch.zeros(2, dtype=torch.int32), as_one)
assert torch.equal(as_one, apart.float() * 2.0**-20)
"""


def test_a_segment_is_scaled_and_measured_by_itself_on_the_host_too() -> None:
    segments = Segments((2, 0, 1), (3, 0, 2))
    scale, inverse = Factors.all_of(torch.device("cpu"), [1.0, 2.0, 4.0], [1.0, 0.5, 0.25])
    values, sums = torch.tensor([1.25, -2.0, 0.5, 3.0, math.inf]), torch.full((5,), 7, dtype=torch.int32)
    for arithmetic in (plain(), fixed_point(torch.device("cpu")), of_a_gpu()):
        largest, back = torch.tensor([0.0, 1.0, 9.0]), torch.empty(5)
        arithmetic.add_segments(values, segments, scale, sums, largest, fresh=True)
        assert largest.tolist() == [0.0, math.inf, 9.0]
        assert sums[:4].tolist() == [5, -8, 2, 6]
        arithmetic.read_segments(sums, segments, inverse, torch.tensor([0, 0, 1]), back)
        assert back[:3].tolist() == [1.25, -2.0, 0.5]
        assert back[3:].isnan().all()


@pytest.mark.parametrize("block", [1, 4, 7, 100])
def test_a_block_knows_which_segments_it_has_a_part_of(block: int) -> None:
    segments = Segments((5, 6, 7, 8, 9), (3, 0, 9, 1, 12))
    table = segments.table(block, torch.device("cpu"))
    assert segments.table(block, torch.device("cpu")) is table
    blocks = -(-25 // block)
    of_element = [index for index, size in enumerate(segments.sizes) for _ in range(size)]
    for number in range(blocks):
        theirs = of_element[number * block : (number + 1) * block]
        assert (int(table[number]), int(table[blocks + number])) == (min(theirs), max(theirs))
    assert table[2 * blocks :].view(-1, 3).tolist() == [[0, 3, 5], [3, 3, 6], [3, 12, 7], [12, 13, 8], [13, 25, 9]]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.timeout(300)
def test_the_kernel_for_a_gpu_computes_the_same_bits_in_tritons_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", INTERPRETED], check=True, env=environment, timeout=300)
