from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rackrun.coordinator.journal.journal_writer import Journal


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path / "journal.sqlite", run_id="job-1")
    yield journal
    journal.close()
