"""A torch that sees none of the host's GPUs is not taken for a wish to train on CPUs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from rackrun.errors import UsageError
from rackrun.worker.process.runtime import _refuse_cpus, _share_gpu


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    (tmp_path / "nvidia0").touch()
    return tmp_path


def cannot() -> None:
    raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update.")


def test_a_driver_that_is_too_old_for_torch_is_named(devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", cannot)
    with pytest.raises(UsageError) as refused:
        _refuse_cpus({}, devices)
    assert "sees none: RuntimeError: The NVIDIA driver on your system is too old (found version 11040)." in str(
        refused.value
    )
    assert "nvidia-smi" in refused.value.remedy


def test_hidden_gpus_other_builds_and_hosts_without_gpus_are_left_alone(
    devices: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "init", cannot)
    monkeypatch.setattr(torch.version, "cuda", None)
    _refuse_cpus({}, devices)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    _refuse_cpus({"CUDA_VISIBLE_DEVICES": ""}, devices)
    (devices / "nvidia0").unlink()
    (devices / "nvidiactl").touch()
    _refuse_cpus({}, devices)


def test_ranks_that_share_a_gpu_are_each_on_a_host_of_their_own_for_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two trays of one host have the same local ranks, and would be two ranks of one host on one GPU: NCCL refuses that."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    told = set()
    for process in (1001, 1002):
        monkeypatch.setattr(os, "environ", {})
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        assert _share_gpu(0) == 0
        told.add(os.environ["NCCL_HOSTID"])
    assert len(told) == 2
