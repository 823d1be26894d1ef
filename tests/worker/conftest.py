"""Fixtures of the workers' tests: whole worlds in one test, and one process that plays a worker's parts alone."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rackrun.link.heartbeat_page import HeartbeatPage
from rackrun.protocol.ids import Incarnation, SlotId
from rackrun.worker.membership.worker_membership import WorkerMembership
from tests.worker.harness import Ended, TinyCluster

ABOUT_THE_DOUBLE = {"test_nccl_double", "test_breaks_on_devices", "test_progress"}
"""They say themselves when it is there."""
ABOUT_THE_HOST = {"test_host_work", "test_host_reads"}
"""They count what the host does in a step. The device of the double is the host."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With a double of NCCL for the workers' device: whole jobs, which have workers. ``RACKRUN_DOUBLE_PART=2/4``: the second quarter of them, drawn
    by their names."""
    if "RACKRUN_NCCL_DOUBLE" not in os.environ:
        return
    part, _, parts = os.environ.get("RACKRUN_DOUBLE_PART", "1/1").partition("/")
    others = {
        item
        for item in items
        if item.path.is_relative_to(Path(__file__).parent)
        and (
            "train" not in getattr(item, "fixturenames", ())
            or item.path.stem in ABOUT_THE_DOUBLE | ABOUT_THE_HOST
            or zlib.crc32(item.nodeid.encode()) % int(parts) != int(part) - 1
        )
    }
    config.hook.pytest_deselected(items=list(others))
    items[:] = [item for item in items if item not in others]


@pytest.fixture
def train() -> Iterator[Callable[..., Ended]]:
    """``train(main, ranks=3, kill={rank: moment}, ...) -> Ended``: a whole job; whatever happens, none of it is left."""
    clusters: list[TinyCluster] = []

    def run(main: Callable[[Any], None], **how: Any) -> Ended:
        cluster = TinyCluster(main, **how)
        clusters.append(cluster)
        return cluster.run()

    yield run
    for cluster in clusters:
        cluster.close()


@pytest.fixture
def world() -> Iterator[WorkerMembership]:
    """Of one process, on the host, that has joined no group yet."""
    fd = HeartbeatPage.create("alone")
    page = HeartbeatPage(fd)
    os.close(fd)
    yield WorkerMembership(page, torch.device("cpu"), SlotId("t/0"), Incarnation(1), "")
    page.close()
