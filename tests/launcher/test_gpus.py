"""A torch for CPUs beside GPUs, and RACKRUN_HEALTH: refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rackrun.errors import UsageError
from rackrun.launch.run.torch_build_check import check_gpus


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    """/dev of a host with two GPUs."""
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    return tmp_path


def test_a_torch_for_cpus_beside_gpus_is_refused_with_two_ways_on(devices: Path) -> None:
    with pytest.raises(UsageError) as refused:
        check_gpus({}, torch="2.13.0+cpu", accelerated=False, devices=devices)
    assert "torch 2.13.0+cpu is built for CPUs, and this host has 2 GPUs (nvidia0)." in str(refused.value)
    assert "install a torch that is built for CUDA" in refused.value.remedy
    assert "CUDA_VISIBLE_DEVICES=" in refused.value.remedy


def test_hidden_gpus_are_not_meant_to_be_used(devices: Path) -> None:
    check_gpus({"CUDA_VISIBLE_DEVICES": " "}, torch="2.13.0+cpu", accelerated=False, devices=devices)


def test_a_torch_for_gpus_is_asked_nothing(devices: Path) -> None:
    check_gpus({}, torch="2.13.0+cu130", accelerated=True, devices=devices)


def test_a_host_without_gpus_needs_no_other_torch(devices: Path) -> None:
    for name in ("nvidia0", "nvidia1"):
        (devices / name).unlink()
    check_gpus({}, torch="2.13.0+cpu", accelerated=False, devices=devices)


def test_a_bad_rackrun_health_is_refused_whatever_else_is_there(devices: Path) -> None:
    with pytest.raises(UsageError, match="RACKRUN_HEALTH=off is not understood"):
        check_gpus({"RACKRUN_HEALTH": "off"}, torch="2.13.0+cu130", accelerated=True, devices=devices)
