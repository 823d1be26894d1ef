"""What is refused before a tray joins, because no worker could compute there."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from rackrun.agent.gpus.start_checks import StartCheck, check_start
from rackrun.agent.gpus.visible_gpus import visible_gpus
from rackrun.topology.gpu_driver.readings import TrayReading
from tests.topology.readings import gpu, tray


def start(
    reading: TrayReading | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    slots: int = 4,
    cuda: str | None = "13.0",
    served: int | None = 13000,
    filler: bool = False,
) -> StartCheck:
    found = msgspec.structs.replace(reading or tray(), cuda=served)
    environment = environment or {}
    visible = visible_gpus(found, environment, slots)
    return check_start(found, visible, slots=slots, cuda=cuda, filler=filler, environment=environment)


def test_a_healthy_tray_may_start() -> None:
    assert start() == StartCheck()


@pytest.mark.parametrize(("cuda", "served"), [("13.2", 13000), ("12.8", 13000), ("12.8", 12000), ("13.0", None)])
def test_a_driver_serves_its_own_major_version_and_older_ones(cuda: str, served: int | None) -> None:
    assert not start(cuda=cuda, served=served).refusal


def test_a_driver_that_is_too_old_is_named_with_what_it_serves() -> None:
    refusal = start(tray(driver="550.54.15"), cuda="13.0", served=12040).refusal
    assert refusal.startswith("the driver 550.54.15 serves CUDA 12.4 and older, and torch is built for CUDA 13.0")
    assert "Remedy: update the driver, or install a torch that is built for CUDA 12." in refusal


def test_a_torch_for_cpus_makes_no_demands_of_the_driver() -> None:
    """It sees no GPU; that this host has some is the launcher's question."""
    assert start(slots=64, cuda=None, served=11000) == StartCheck()


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({}, "4 GPUs"),
        ({"CUDA_VISIBLE_DEVICES": "2"}, "1 GPU"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-3,GPU-1"}, "2 GPUs"),
        ({"CUDA_VISIBLE_DEVICES": "0,1,9"}, "2 GPUs (CUDA_VISIBLE_DEVICES names '9', which the driver does not list)"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-7"}, "no GPU (CUDA_VISIBLE_DEVICES names 'GPU-7'"),
        ({"CUDA_VISIBLE_DEVICES": "1,1"}, "no GPU (CUDA_VISIBLE_DEVICES=1,1 names a GPU twice"),
    ],
)
def test_fewer_gpus_than_workers_are_refused_with_the_reason(environment: dict[str, str], shown: str) -> None:
    refusal = start(environment=environment, slots=5).refusal
    assert refusal.startswith(f"5 workers are to run here, and CUDA shows {shown}")
    assert "--nproc-per-node" in refusal


def test_uuids_are_as_good_as_indices() -> None:
    assert start(environment={"CUDA_VISIBLE_DEVICES": "GPU-3,GPU-1"}, slots=2) == StartCheck()


def test_workers_that_are_told_to_share_gpus_need_only_one() -> None:
    shared = {"RACKRUN_SHARE_GPUS": "1", "CUDA_VISIBLE_DEVICES": "2"}
    assert not start(environment=shared).refusal
    assert start(environment={**shared, "CUDA_VISIBLE_DEVICES": "1,1"}).refusal


def test_slices_of_gpus_serve_one_worker_alone() -> None:
    cut = tray(gpu(1, mig=True))
    assert not start(cut, slots=1).refusal
    assert "GPU 1 is cut into slices (MIG)" in start(cut).refusal
    named = {"CUDA_VISIBLE_DEVICES": "MIG-aaaa,MIG-bbbb"}
    assert start(environment=named, slots=2).refusal.startswith("CUDA_VISIBLE_DEVICES names slices (MIG)")
    assert not start(environment=named, slots=1).refusal


def test_a_sliced_gpu_that_nobody_here_uses_is_nobodys_business() -> None:
    assert not start(tray(gpu(3, mig=True)), {"CUDA_VISIBLE_DEVICES": "0,1"}, slots=2).refusal


def test_a_gpu_that_no_process_may_use_is_refused() -> None:
    refusal = start(tray(gpu(2, mode="prohibited"))).refusal
    assert refusal.startswith("GPU 2 is in compute mode PROHIBITED")
    assert "Remedy: nvidia-smi -i 2 -c DEFAULT." in refusal


def test_exclusive_mode_is_right_for_one_process_a_gpu_and_for_no_more() -> None:
    one = tray(gpu(2, mode="exclusive"))
    assert start(one) == StartCheck()
    assert "a filler is to run beside its spare" in start(one, filler=True).refusal
    assert "RACKRUN_SHARE_GPUS" in start(one, {"RACKRUN_SHARE_GPUS": "1"}).refusal
    taken = start(tray(gpu(2, mode="exclusive", users=(4711,))))
    assert taken.refusal.startswith("GPU 2 is in compute mode EXCLUSIVE_PROCESS, and process 4711 uses it already.")


def test_another_process_on_a_gpu_is_said_and_not_refused() -> None:
    found = start(tray(gpu(1, users=(17, 99))))
    assert found == StartCheck(
        notes=("GPU 1: processes 17, 99 use it already; what it holds of the memory is missing to the worker there",)
    )
