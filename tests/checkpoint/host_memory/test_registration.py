"""Memory that a driver will not register leaves nothing behind that somebody else's kernel would raise."""

from __future__ import annotations

import pytest

from rackrun.checkpoint.host_memory import host_registration
from rackrun.checkpoint.host_memory.host_registration import register_memory, unregister_memory


class Runtime:
    """CUDA's, as far as it is asked: the last error stays until somebody takes it."""

    def __init__(self, code: int) -> None:
        self.code, self.last_error = code, 0
        self.registered: list[tuple[int, int]] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 0
        if self.code == 0:
            self.registered.append((address, size))
        self.last_error = self.code
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.last_error = 0 if any(one == address for one, _ in self.registered) else 713
        self.registered = [one for one in self.registered if one[0] != address]
        return self.last_error

    def cudaGetLastError(self) -> int:
        taken, self.last_error = self.last_error, 0
        return taken


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Runtime]:
    runtimes = [Runtime(0)]
    monkeypatch.setattr(host_registration, "loaded_library", lambda _: runtimes[0])
    return runtimes


def test_what_can_be_registered_is(loaded: list[Runtime]) -> None:
    runtime = loaded[0]
    assert register_memory(4096, 8192, runtime)
    assert runtime.registered == [(4096, 8192)]
    assert unregister_memory(4096, runtime)
    assert not runtime.registered


@pytest.mark.parametrize("code", [1, 2, 712])
def test_what_cannot_be_leaves_no_error_behind(code: int, loaded: list[Runtime]) -> None:
    loaded[0] = runtime = Runtime(code)
    assert not register_memory(4096, 8192, runtime)
    assert runtime.last_error == 0
    assert not unregister_memory(4096, runtime)
    assert runtime.last_error == 0


def test_without_the_library_nothing_is_raised() -> None:
    assert not register_memory(4096, 8192, Runtime(1))
