"""Fixtures of the checkpoint's tests. They are no package; their helpers lie beside them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of an arena."""
    return tmp_path / "rank-00003.arena"
