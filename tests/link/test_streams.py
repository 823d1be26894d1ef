"""Nobody there to read what a launcher or an agent says is no reason to end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SAYS = """
import os, sys
from rackrun.link.process.standard_streams import open_closed_streams, say_what_can_be_said
open_closed_streams()
say_what_can_be_said()
fd = os.open("/dev/null", os.O_RDONLY)
assert fd > 2, "nothing else has the number of a standard stream"
for _ in range(3):
    print("x" * 100_000, flush=True)
    print("\\ud800 y", file=sys.stderr, flush=True)
sys.exit(7)
"""


def run(*redirections: str, **options: Any) -> int:
    script = f'exec "$@" {" ".join(redirections)}'
    command = ["sh", "-c", script, "sh", sys.executable, "-c", SAYS]
    ran = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, **options)
    return int(ran.returncode)


@pytest.mark.parametrize("closed", [("2>&-",), ("1>&-", "2>&-"), ("0<&-", "1>&-", "2>&-"), ("0<&-",)])
def test_streams_that_are_closed_from_the_start(closed: tuple[str, ...]) -> None:
    assert run(*closed, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 7


def test_streams_that_nobody_reads_any_more() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert run(stdout=writing, stderr=writing) == 7
    finally:
        os.close(writing)


def test_a_full_disk_behind_them() -> None:
    with open("/dev/full", "wb") as full:
        assert run(stdout=full, stderr=full) == 7
