"""The example that trains on a stream of packed tokens: ranks are lost, and its report says that each sample was used once."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rackrun.coordinator.report.run_report import read_report

pytestmark = [pytest.mark.frameworks, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "faults" / "scripts" / "train_stream.py"
STEPS, BATCH = 24, 16


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    example = ROOT / "examples" / "train_stream.py"
    command = [sys.executable, str(example), "--prepare", str(tmp_path / "tokens")]
    subprocess.run(command, check=True, timeout=60)
    return tmp_path / "tokens"


@pytest.mark.parametrize("where", ["0:20", pytest.param("1:19", marks=pytest.mark.stories)])
def test_it_ends_with_the_weights_of_a_run_without_faults(
    where: str, tokens: Path, tmp_path: Path, run_rackrun: Callable[..., Any]
) -> None:
    def trained(kill: str, *options: object) -> str:
        given = [SCRIPT, tmp_path, kill, "--tokens", tokens, "--steps", STEPS]
        ran = run_rackrun(["--standalone", *options, *given], timeout=100, env={"OMP_NUM_THREADS": "1"})
        assert ran.exit_code == 0, ran
        ledger = read_report(ran.out_dir / "journal.sqlite").ledger
        assert ledger.ok, ledger
        assert (ledger.units, ledger.samples, ledger.distinct) == (STEPS + 1, STEPS * BATCH, STEPS * BATCH)
        found = re.findall(r"final weights sha256 (\w+)", ran.stdout)
        assert len(set(found)) == 1, ran
        return str(found[0])

    reference = trained("", "--nproc-per-node", 2)
    assert trained(where, "--nproc-per-node", 3, "--spares", 1) == reference
    assert (tmp_path / "struck").exists()
