"""Fixtures of the checkpoint's tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of an arena."""
    return tmp_path / "rank-00003.arena"
