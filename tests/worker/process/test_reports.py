"""What a worker tells of its copies: each once, by its step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rackrun.link.heartbeat_page import HeartbeatPage
from rackrun.protocol.ids import Generation, Step, snapshot_id
from rackrun.protocol.wire import StateCopied
from rackrun.worker.process.reports import Reports


@pytest.fixture
def page() -> Iterator[HeartbeatPage]:
    fd = HeartbeatPage.create("reports")
    page = HeartbeatPage(fd)
    os.close(fd)
    yield page
    page.close()


@pytest.mark.parametrize("layout", [0, 3])
def test_a_snapshot_is_told_once_by_its_step_in_the_layout_of_now(layout: int, page: HeartbeatPage) -> None:
    sent: list[Any] = []
    world = SimpleNamespace(layout=layout, generation=4, rank=1)
    boot = SimpleNamespace(slot="t/1", incarnation=2)
    runtime: Any = SimpleNamespace(
        channel=SimpleNamespace(send=sent.append), boot=boot, world=world, device=torch.device("cpu")
    )
    reports = Reports(runtime)

    def told() -> list[tuple[str, int, int]]:
        reports.snapshots(page, size=10, seconds=0.5)
        new = [(one.kind, one.at.step, one.bytes) for one in sent if isinstance(one, StateCopied)]
        sent.clear()
        return new

    assert told() == []
    page.seal_snapshot(0, snapshot_id(Generation(layout), Step(0)))
    assert told() == [("snapshot", 0, 10)]
    assert told() == []
    page.seal_snapshot(1, snapshot_id(Generation(layout), Step(5)))
    assert told() == [("snapshot", 5, 10)]
    page.seal_snapshot(0, snapshot_id(Generation(layout + 1), Step(7)))
    assert told() == []
