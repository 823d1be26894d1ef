"""A plugin of pytest, for `tests.mutants.reach`: tells coverage.py which test runs, and writes down how long each took."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

_SECONDS: defaultdict[str, float] = defaultdict(float)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    running = coverage.Coverage.current()
    assert running is not None, "started by COVERAGE_PROCESS_START"
    running.switch_context(item.nodeid)
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.outcome == "passed":
        _SECONDS[report.nodeid] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):  # the others' reports come to the one that started them
        Path(os.environ["RACKRUN_DURATIONS"]).write_text(json.dumps(_SECONDS))
