"""What bits depend on beside the script is recorded, and compared before anybody goes on from another's state."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rackrun.worker.device import numerics
from rackrun.worker.device.numerics import numerics_of, unlike
from rackrun.worker.loop.run import Run
from tests.worker.harness import Ended, moments
from tests.worker.scripts import adam, ddp, fit

Train = Callable[..., Ended]
CPU = torch.device("cpu")


@pytest.fixture
def settings() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("settings")
def test_a_setting_counts_as_it_is_when_it_is_asked_for() -> None:
    before = numerics_of(CPU)
    assert not unlike(before, CPU)
    torch.use_deterministic_algorithms(True)
    assert unlike(before, CPU) == "deterministic algorithms False (here True)"


@pytest.mark.parametrize("name", ["MKL_CBWR", "TORCHINDUCTOR_DETERMINISTIC"])
def test_variables_of_libraries_count(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = numerics_of(CPU)
    monkeypatch.setenv(name, "COMPATIBLE")
    assert unlike(before, CPU) == f"{name} {before[name]} (here COMPATIBLE)"


def test_threads_and_the_instructions_of_a_processor_count() -> None:
    assert {"torch", "processor", "CPU capability", "threads"} <= numerics_of(CPU).keys()


class Library:
    """cuBLAS, as far as it is asked."""

    def cublasGetProperty(self, which: int, into: Any) -> int:
        into._obj.value = (13, 1, 2)[which]
        return 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    device = torch.device("cuda", 0)
    properties = types.SimpleNamespace(name="NVIDIA H200", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(numerics, "loaded_library", lambda _: Library())
    numerics._of_gpu.cache_clear()
    yield device
    numerics._of_gpu.cache_clear()


def test_a_gpu_is_known_by_its_kind_and_its_libraries(gpu: torch.device) -> None:
    found = numerics_of(gpu)
    assert (found["GPU"], found["SMs"], found["NCCL"], found["cuBLAS"]) == ("NVIDIA H200", "132", "2.28.9", "13.1.2")
    assert found.keys() >= {
        *("torch", "driver", "CUDA", "cuDNN", "triton", "TF32 in matmul", "TF32 in cuDNN", "cudnn.benchmark"),
        *("cudnn.deterministic", "deterministic algorithms", "float32 matmul precision", "CUBLAS_WORKSPACE_CONFIG"),
        *("NCCL_ALGO", "NCCL_PROTO", "TORCHINDUCTOR_DETERMINISTIC"),
    }


@pytest.mark.usefixtures("settings")
def test_settings_of_a_gpu_count(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    before = numerics_of(gpu)
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert unlike(before, gpu) == "cudnn.benchmark False (here True), NCCL_ALGO none (here Ring)"


def test_where_a_library_is_not_there_its_version_is_unknown(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numerics, "loaded_library", lambda _: None)
    assert numerics_of(gpu)["cuBLAS"] == "unknown"


def test_tf32_is_read_by_whichever_name_torch_lets_it_be_read(gpu: torch.device) -> None:
    class Newer:
        fp32_precision = "tf32"

        @property
        def allow_tf32(self) -> bool:
            raise RuntimeError("mix of the legacy and new APIs")

    assert numerics._tf32(Newer()) == "tf32"
    assert numerics._tf32(types.SimpleNamespace(allow_tf32=True)) is True


# -- in a job ------------------------------------------------------------------------------------------------------
def trains(**spare: str) -> Callable[[Run], None]:
    """``spare``: what the spare's libraries are told, and those of nobody else."""

    def main(run: Run) -> None:
        import os

        if run._runtime.spare:
            os.environ.update(spare)
        model = ddp(run)
        fit(run, model, adam(model))

    return main


def test_a_spare_that_computes_otherwise_is_told_of_when_it_is_ready_and_when_it_takes_over(
    train: Train, capfd: pytest.CaptureFixture[str]
) -> None:
    reference = train(trains())
    ended = train(trains(MKL_CBWR="COMPATIBLE"), kill={2: moments(reference, 2, "numerics")[0]})
    assert ended.exit_code == 0, ended
    assert [notice for notice in ended.story if "MKL_CBWR COMPATIBLE (there none)" in notice], ended
    told = capfd.readouterr().err
    assert (
        "rank 2, in generation 2, goes on from a state that was computed with MKL_CBWR none (here COMPATIBLE)" in told
    )


def test_a_spare_that_computes_alike_is_not(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    reference = train(trains())
    ended = train(trains(), kill={2: moments(reference, 2, "numerics")[0]})
    assert not ended.differences(reference), ended
    assert not [notice for notice in ended.story if "does not compute as" in notice]
    assert "not promised" not in capfd.readouterr().err


def test_a_job_that_goes_on_from_what_was_computed_otherwise_is_told_so(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RACKRUN_CHECKPOINT_DIR", str(tmp_path))
    monkeypatch.setenv("RACKRUN_CHECKPOINT_EVERY", "2")
    train(trains())
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert train(trains()).exit_code == 0
    told = capfd.readouterr().err
    assert told.count("goes on from a state that was computed with MKL_CBWR none (here COMPATIBLE)") == 1
