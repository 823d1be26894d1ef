"""A library that plays NVML, and racks for it to speak of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rackrun.chaos.testbed.fake_nvml.fake_driver import FakeRack, FakeTray, build
from rackrun.topology.model.rack_file import read_rack_file
from rackrun.topology.model.racks import Topology

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "racks"


@dataclass
class Fake:
    """A simulated rack, and the environment of a process on one of its trays."""

    topology: Topology
    rack: FakeRack
    library: Path

    def tray(self, name: str) -> FakeTray:
        return self.rack.tray(name)

    def env(self, name: str, library: Path | None = None) -> dict[str, str]:
        return self.rack.environment(library or self.library, name)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def fake(library: Path, tmp_path: Path) -> Iterator[Callable[..., Fake]]:
    """``fake("gb200-nvl72") -> Fake``, of a rack file in examples/racks."""
    racks: list[FakeRack] = []

    def make(name: str = "gb200-nvl72") -> Fake:
        topology = read_rack_file(EXAMPLES / f"{name}.yaml")
        racks.append(FakeRack.create(tmp_path / f"{name}.state", topology))
        return Fake(topology, racks[-1], library)

    yield make
    for rack in racks:
        rack.close()
