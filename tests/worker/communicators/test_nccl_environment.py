"""What a worker's environment says to NCCL and to torch's group around it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import rackrun.worker
from rackrun.worker.communicators.communicator import COLLECTIVE_TIMEOUT
from rackrun.worker.communicators.nccl_environment import prepare_environment


def test_what_a_recovery_hangs_on_is_not_the_users_to_say() -> None:
    environment = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_NCCL_ENABLE_MONITORING": "1"}
    prepare_environment(environment)
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == environment["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert environment["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] == "1"


def test_what_else_is_set_stays_as_it_is() -> None:
    environment = {"NCCL_NVLS_ENABLE": "1", "TORCH_NCCL_NONBLOCKING_TIMEOUT": "60", "NCCL_ALGO": "Ring"}
    prepare_environment(environment)
    assert environment["NCCL_NVLS_ENABLE"] == "1"
    assert environment["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "60"
    assert environment["NCCL_ALGO"] == "Ring"
    assert environment["TORCH_NCCL_RANKS_PER_ROOT"] == "128"


def test_a_first_call_may_wait_for_its_peers_as_long_as_any_collective() -> None:
    """They may be compiling, or writing a checkpoint: to give up would break a healthy generation."""
    environment: dict[str, str] = {}
    prepare_environment(environment)
    assert int(environment["TORCH_NCCL_NONBLOCKING_TIMEOUT"]) == COLLECTIVE_TIMEOUT.total_seconds()


@pytest.mark.parametrize("name", ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
def test_collectives_are_recorded_for_who_has_asked_by_whichever_name(name: str) -> None:
    environment = {name: "500"}
    prepare_environment(environment)
    assert {key: value for key, value in environment.items() if "BUFFER_SIZE" in key} == {name: "500"}


def test_collectives_are_not_recorded_for_nobody() -> None:
    environment: dict[str, str] = {}
    prepare_environment(environment)
    assert environment["TORCH_FR_BUFFER_SIZE"] == "0"
    assert "TORCH_NCCL_TRACE_BUFFER_SIZE" not in environment, "torch prints a warning where it is set"


def test_nothing_else_in_a_worker_writes_the_environment() -> None:
    """A thread may be reading it, in C. `feature_probe` is over before there are threads."""
    found = [
        f"{path.stem}:{node.lineno}"
        for path in sorted(Path(rackrun.worker.__file__).parent.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "os.environ"
    ]
    assert all(place.startswith("feature_probe:") for place in found), found
