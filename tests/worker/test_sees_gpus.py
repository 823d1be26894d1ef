"""A torch that sees none of the host's GPUs is not taken for a wish to train on CPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rackrun.errors import UsageError
from rackrun.worker.runtime import _refuse_cpus


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
