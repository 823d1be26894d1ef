"""Fixtures of the workers' tests: whole worlds in one test, and one process that plays a worker's parts alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests are no package; their helpers lie beside them
from harness import Ended, TinyCluster


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
