"""What a step has freed stays with the process, for the next step."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROBE = """
import ctypes, resource, sys
from rackrun.agent.worker_start.heap_thresholds import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
size, faults = 8 << 20, []
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(size) for _ in range(4)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks:
        libc.free(block)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(faults[-1])
"""


@pytest.mark.skipif("glibc" not in str(os.confstr("CS_GNU_LIBC_VERSION")), reason="another C library")
def test_a_step_gets_the_pages_that_the_step_before_has_freed() -> None:
    faults = subprocess.run([sys.executable, "-c", PROBE, "kept"], capture_output=True, text=True, check=True).stdout
    assert int(faults) < 100, "of 8192 pages"


def test_thresholds_that_the_user_has_set_stand() -> None:
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    command = [sys.executable, "-c", PROBE, "kept"]
    faults = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    assert int(faults) > 8000
