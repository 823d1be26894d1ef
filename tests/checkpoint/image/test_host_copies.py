"""Copies of a GPU's state: on a stream of their own, behind what had been asked for, and awaited before they are used."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rackrun.checkpoint.image import host_copies
from rackrun.checkpoint.image.host_copies import HostCopies, ImageCopy, copies_from
from rackrun.checkpoint.image.rank_image import Image
from rackrun.checkpoint.image.safetensors_image import plan_image, write_tensors
from rackrun.checkpoint.image.tensor_entries import entries_of


class Gpu:
    """torch.cuda's streams and events, as a list of what was asked for. Each thread has to say first which device it uses."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.threads: set[int] = set()
        self.stream_of_thread: dict[int, str] = {}

    def set_device(self, _: Any) -> None:
        self.threads.add(threading.get_ident())

    def stream(self, name: str) -> Stream:
        return Stream(self, name)

    @contextlib.contextmanager
    def within(self, stream: Stream) -> Iterator[None]:
        self.stream_of_thread[threading.get_ident()] = stream.name
        yield
        del self.stream_of_thread[threading.get_ident()]


class Stream:
    def __init__(self, gpu: Gpu, name: str) -> None:
        self._gpu, self.name = gpu, name

    def wait_event(self, event: Event) -> None:
        assert threading.get_ident() in self._gpu.threads
        self._gpu.said.append(f"{self.name} waits for {event.name}")

    def synchronize(self) -> None:
        self._gpu.said.append(f"the host waits for {self.name}")


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self.name = gpu, "nothing"

    def record(self) -> None:
        self.name = self._gpu.stream_of_thread.get(threading.get_ident(), "what trains")

    def synchronize(self) -> None:
        self._gpu.said.append(f"the host waits for a place in {self.name}")

    def elapsed_time(self, other: Event) -> float:
        return 250.0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    found = Gpu()
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: found.stream("its own stream"))
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: Event(found))
    monkeypatch.setattr(torch.cuda, "set_device", found.set_device)
    monkeypatch.setattr(torch.cuda, "stream", found.within)
    foreach = torch._foreach_copy_

    def copy(*args: Any, **how: Any) -> None:
        found.said.append(f"{len(args[0])} copies")
        foreach(*args, **how)

    monkeypatch.setattr(torch, "_foreach_copy_", copy)
    return found


def planned() -> tuple[Image, bytearray]:
    """A shard, and what its image holds of its tensors."""
    tensors = {f"m/param/{i}": torch.randn(i + 1, 3) for i in range(50)}
    layout = plan_image([one for each in tensors.items() for one in entries_of(dict([each]))], 0)
    expected = bytearray(layout.total_bytes)
    write_tensors(layout, tensors, memoryview(expected))
    return Image(layout, tensors, b""), expected


def in_a_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(60.0)
    assert not thread.is_alive()


def test_a_snapshot_is_one_call_behind_what_trains(gpu: Gpu) -> None:
    shard, expected = planned()
    found = bytearray(len(expected))
    device = copies_from(torch.device("cuda", 0))
    now = {"m/param/7", "m/param/9"}
    device.copy_now(shard, memoryview(found), now)
    ready = device.ready()
    in_a_thread(lambda: device.copy(shard, memoryview(found), shard.tensors.keys() - now, ready))
    assert found == expected
    assert gpu.said == [
        *(
            "2 copies",
            "its own stream waits for what trains",
            "48 copies",
            "the host waits for a place in its own stream",
        ),
        *("the host waits for its own stream", "the host waits for a place in what trains"),
    ]
    assert device.held_up_s() == 0.25


def test_what_has_come_is_told_group_by_group(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "_GROUP_BYTES", 4000)
    shard, expected = planned()
    found, told = bytearray(len(expected)), list[int]()
    device = copies_from(torch.device("cuda", 0))

    def filled(upto: int) -> None:
        assert gpu.said[-1] == "the host waits for a place in its own stream"
        assert found[:upto] == expected[:upto]
        told.append(upto)

    in_a_thread(lambda: device.copy(shard, memoryview(found), shard.tensors.keys(), device.ready(), filled))
    assert len(told) > 2
    assert told == sorted(told)
    assert told[-1] == max(stop for _, stop in shard.layout.extents.values())


@pytest.mark.parametrize("of_nothing", [True, False])
def test_whatever_happens_nothing_is_on_its_way_afterwards(gpu: Gpu, of_nothing: bool) -> None:
    shard, expected = planned()
    found, device = bytearray(len(expected)), copies_from(torch.device("cuda", 0))
    device.copy_now(shard, memoryview(found), shard.tensors.keys())
    ready, failed = device.ready(), list[str]()

    def breaks(_: int) -> None:
        raise ValueError("no room for a thread")

    def copy() -> None:
        try:
            device.copy(shard, memoryview(found), () if of_nothing else shard.tensors.keys(), ready, breaks)
        except ValueError as error:
            failed.append(str(error))

    in_a_thread(copy)
    assert failed == ([] if of_nothing else ["no room for a thread"])
    assert gpu.said[-2:] == ["the host waits for its own stream", "the host waits for a place in what trains"]


def test_a_copy_that_is_given_up_is_waited_for_before_its_memory_is_used_for_something_else(gpu: Gpu) -> None:
    shard, expected = planned()
    copy = ImageCopy(shard, set(), memoryview(bytearray(len(expected))), copies_from(torch.device("cuda", 0)))
    assert gpu.said == ["50 copies"]
    copy.abandon()
    assert gpu.said == ["50 copies", "the host waits for a place in what trains"]
    assert not shard.tensors


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
    monkeypatch.setattr(host_copies, "say", pytest.fail)
    device = copies_from(torch.device("cuda", 0))
    device.pin(2**32, 600 * 2**20)
    thread = device._pinning._memories[2**32].thread  # type: ignore[attr-defined]
    thread.join(60.0)
    assert [size for _, size in registered] == [256 * 2**20, 256 * 2**20, 88 * 2**20]
    device.unpin(2**32)
    assert not registered


# -- the copy of one image
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_may_change_is_copied_at_once_and_the_rest_when_it_finishes(gpu: Gpu, device: str) -> None:
    image, expected = planned()
    tensors = dict(image.tensors)
    settled = {f"m/param/{i}" for i in range(40)}
    found, told = bytearray(len(expected)), list[int]()
    expected[: len(image.layout.header)] = image.layout.header
    copy = ImageCopy(image, settled, memoryview(found), copies_from(torch.device(device)))
    for name in tensors.keys() - settled:
        tensors[name].zero_()
    in_a_thread(lambda: told.append(copy.finish()))
    assert told == [True]
    assert found == expected
    assert not image.tensors, "the caller may free them"


def test_who_trains_may_drop_the_tensors_instead_of_who_copies() -> None:
    """The end of a tensor object gives the interpreter's lock up."""
    image, _ = planned()
    copy = ImageCopy(image, set(image.tensors), memoryview(bytearray(image.layout.total_bytes)), HostCopies())
    in_a_thread(lambda: copy.finish(drop=False))
    assert len(image.tensors) == 50
    copy.drop()
    assert not image.tensors


def test_who_has_streams_of_its_own_gets_the_image_back_only_when_it_is_copied(gpu: Gpu) -> None:
    for waits in (False, True):
        image, expected = planned()
        gpu.said.clear()
        device = copies_from(torch.device("cuda", 0))
        copy = ImageCopy(image, set(), memoryview(bytearray(len(expected))), device, waits=waits)
        assert ("the host waits for a place in what trains" in gpu.said) is waits
        in_a_thread(copy.finish)


@pytest.mark.parametrize("fails", [True, False])
def test_a_settled_tensor_that_was_changed_meanwhile_is_noticed(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    image, expected = planned()
    settled = set(image.tensors)
    copy = ImageCopy(image, settled, memoryview(bytearray(len(expected))), HostCopies())
    image.tensors["m/param/3"].add_(1.0)
    if fails:
        monkeypatch.setattr(HostCopies, "copy", lambda *_: int("no number"))
        with pytest.raises(ValueError, match="no number"):
            copy.finish()
    else:
        assert copy.finish() is False
    assert not image.tensors
