"""Trays as published profiles of NVML describe them: discovery finds on each what it has, and nothing that it has not."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import pytest

from rackrun.chaos.testbed.fake_nvml.fake_driver import FakeRack
from rackrun.topology.gpu_driver.nvml_watch import read_once
from rackrun.topology.gpu_driver.readings import TrayReading
from rackrun.topology.health.findings import preflight
from rackrun.topology.model.rack_file import read_rack_file
from rackrun.topology.model.racks import CliqueId
from rackrun.topology.sources.partial_topology import merge, partial_of_reading

GOLDEN = Path(__file__).parents[1] / "golden"


class Profile(NamedTuple):
    name: str
    driver: str
    links: int
    fabric: Literal["", "alone", "joined"]
    """No word of it; registered, without a cluster UUID; in a domain."""
    clique: CliqueId
    chassis: str = ""

    def play(self, path: Path) -> FakeRack:
        topology = read_rack_file(GOLDEN / f"nvml-{self.name}.yaml")
        rack = FakeRack.create(path, topology, driver=self.driver, links=self.links)
        tray = rack.tray("tray-00")
        for index in range(tray.gpus):
            gpu = tray.gpu[index]
            gpu.links, gpu.link_state[: self.links] = self.links, [1] * self.links
            if self.fabric == "alone":
                gpu.fabric_state = 3
            elif not self.fabric:
                tray.fail(index, "fabric", "NOT_SUPPORTED")
        return rack


HOST = CliqueId("host:a", 0)
RACK = CliqueId("4f2c9a1e-7d0b-4a5e-9c3f-1b8e6d2a7c90", 32766)


@pytest.mark.parametrize(
    "profile",
    [
        Profile("a100", "550.163.01", 12, "", HOST),
        Profile("h100", "550.163.01", 18, "alone", HOST),
        Profile("b200", "560.35.03", 18, "alone", HOST),
        Profile("gb200", "580.65.06", 18, "joined", RACK, "1825024170029"),
        Profile("l40s", "550.163.01", 0, "", HOST),
    ],
    ids=lambda profile: profile.name,
)
def test_discovery_finds_what_a_profile_has(profile: Profile, library: Path, tmp_path: Path) -> None:
    rack = profile.play(tmp_path / "rack.state")
    try:
        reading = read_once(env=rack.environment(library, "tray-00"), timeout_s=100.0)
    finally:
        rack.close()
    assert isinstance(reading, TrayReading), reading
    (described,) = read_rack_file(GOLDEN / f"nvml-{profile.name}.yaml").racks[0].trays
    assert [(one.uuid, one.bdf, one.serial, one.numa) for one in reading.gpus] == [
        (one.uuid, f"0000{one.bdf}", one.serial, one.numa) for one in described.gpus
    ]
    missing = {name for name, has in (("links", profile.links), ("fabric", profile.fabric)) if not has}
    for gpu in reading.gpus:
        assert set(gpu.unknown) == missing | ({"platform"} if not profile.chassis else set())
        assert gpu.links == ((1,) * profile.links or None)
        assert (gpu.fabric is not None) == bool(profile.fabric)
        assert (gpu.platform.chassis if gpu.platform else "") == profile.chassis
    found = partial_of_reading(reading, "a")
    topology = merge([found])
    assert found.notes == ()
    assert {seat.clique for seat in topology.seats} == {profile.clique}
    indices = [gpu.index for gpu in reading.gpus]
    assert preflight(reading, indices, clique=profile.clique, links=profile.links) == ()
