"""Copies of a GPU's state: on a stream of their own, behind what had been asked for, and awaited before they are used."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch

from rackrun.checkpoint.entries import entries_of
from rackrun.checkpoint.image import plan_image, write_tensors
from rackrun.worker import copies
from rackrun.worker.copies import copies_from
from rackrun.worker.image import Shard


class Gpu:
    """torch.cuda's streams and events, as a list of what was asked for. Each thread has to say first which device it uses."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.threads: set[int] = set()

    def set_device(self, _: Any) -> None:
        self.threads.add(threading.get_ident())

    def stream(self, name: str) -> Stream:
        return Stream(self, name)


class Stream:
    def __init__(self, gpu: Gpu, name: str) -> None:
        self._gpu, self._name = gpu, name

    def wait_event(self, event: Event) -> None:
        assert threading.get_ident() in self._gpu.threads
        self._gpu.said.append(f"{self._name} waits for {event.name}")

    def synchronize(self) -> None:
        self._gpu.said.append(f"the host waits for {self._name}")


class Event:
    name = "nothing"

    def record(self) -> None:
        self.name = "what trains"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    found = Gpu()
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: found.stream("its own stream"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "set_device", found.set_device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: found.stream("the training stream"))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    foreach = torch._foreach_copy_

    def copy(*args: Any, **how: Any) -> None:
        found.said.append(f"{len(args[0])} copies")
        foreach(*args, **how)

    monkeypatch.setattr(torch, "_foreach_copy_", copy)
    return found


def test_a_snapshot_is_one_call_behind_what_trains(gpu: Gpu) -> None:
    tensors = {f"m/param/{i}": torch.randn(i + 1, 3) for i in range(50)}
    layout = plan_image([one for each in tensors.items() for one in entries_of(dict([each]))], 0)
    expected, found = bytearray(layout.total_bytes), bytearray(layout.total_bytes)
    write_tensors(layout, tensors, memoryview(expected))
    shard = Shard(layout, tensors, b"")
    device = copies_from(torch.device("cuda", 0))
    now = {"m/param/7", "m/param/9"}
    device.copy_now(shard, memoryview(found), now)
    ready = device.ready()
    thread = threading.Thread(
        target=device.copy, args=[shard, memoryview(found), tensors.keys() - now, ready], daemon=True
    )
    thread.start()
    thread.join(60.0)
    assert found == expected
    assert gpu.said == [
        *("2 copies", "the host waits for the training stream"),
        *("its own stream waits for what trains", "48 copies", "the host waits for its own stream"),
    ]


def test_memory_is_registered_by_a_thread_that_has_chosen_its_device(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[tuple[int, int]] = []

    class Driver:
        def cudaHostRegister(self, address: int, size: int, _: int) -> int:
            assert threading.get_ident() in gpu.threads
            assert threading.current_thread() is not threading.main_thread()
            registered.append((address, size))
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            registered[:] = [one for one in registered if one[0] != address]
            return 0

    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(copies, "say", pytest.fail)
    device = copies_from(torch.device("cuda", 0))
    device.pin(2**32, 600 * 2**20)
    thread = device._pinning._memories[2**32].thread  # type: ignore[attr-defined]
    thread.join(60.0)
    assert [size for _, size in registered] == [256 * 2**20, 256 * 2**20, 88 * 2**20]
    device.unpin(2**32)
    assert not registered
