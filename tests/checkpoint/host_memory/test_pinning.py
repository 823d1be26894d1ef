"""Memory is registered with the driver piece by piece, beside training, and told of once where it is not."""

from __future__ import annotations

import threading

import pytest

from rackrun.checkpoint.host_memory import background_pinning, host_registration
from rackrun.checkpoint.host_memory.background_pinning import Pinning

PIECE = 1000


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_pinning, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(host_registration, "loaded_library", lambda _: None)


class Driver:
    """CUDA's runtime, as far as it is asked: each call waits until the test lets one go. ``refuses``: from the n-th on."""

    def __init__(self, refuses: int = 10**9) -> None:
        self.refuses = refuses
        self.pieces: dict[int, int] = {}
        self.devices: dict[int, None] = {}
        """The threads that have said which device they use."""
        self.asked = threading.Semaphore(0)
        self.may_go = threading.Semaphore(0)
        self.calls = 0

    def use_device(self) -> None:
        self.devices[threading.get_ident()] = None

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 0
        assert threading.get_ident() in self.devices, "it would make a context on the first GPU"
        assert all(address + size <= one or one + others <= address for one, others in self.pieces.items())
        self.calls += 1
        self.asked.release()
        assert self.may_go.acquire(timeout=60.0)
        if self.calls > self.refuses:
            return 2
        self.pieces[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pieces[address]
        return 0

    def let_go(self, calls: int) -> None:
        for _ in range(calls):
            self.may_go.release()


def wait_pinned(pinning_: Pinning, address: int) -> None:
    thread = pinning_._memories[address].thread
    assert thread is not None
    thread.join(60.0)
    assert not thread.is_alive()


def test_whoever_pins_does_not_wait() -> None:
    driver, told = Driver(), list[str]()
    pinned = Pinning(driver.use_device, told.append, driver)
    pinned.pin(4096, 2500)
    assert driver.asked.acquire(timeout=60.0)
    assert not driver.pieces, "the driver has not answered yet"
    driver.let_go(3)
    wait_pinned(pinned, 4096)
    assert driver.pieces == {4096: PIECE, 5096: PIECE, 6096: 500}
    pinned.unpin(4096)
    assert not driver.pieces
    assert not told


def test_what_goes_while_it_is_registered_is_left_after_the_piece_in_hand() -> None:
    driver = Driver()
    pinned = Pinning(driver.use_device, lambda _: None, driver)
    pinned.pin(4096, 100 * PIECE)
    assert driver.asked.acquire(timeout=60.0)
    thread = pinned._memories[4096].thread
    pinned._memories[4096].gone = True  # as unpin says, before it waits
    driver.let_go(1)
    pinned.unpin(4096)
    assert thread is not None
    assert not thread.is_alive()
    assert driver.calls == 1
    assert not driver.pieces


def test_what_the_driver_refuses_is_told_once_and_what_it_has_taken_stays() -> None:
    driver, told = Driver(refuses=2), list[str]()
    pinned = Pinning(driver.use_device, told.append, driver)
    driver.let_go(10)
    for address in (0, 10 * PIECE):
        pinned.pin(address, 5 * PIECE)
        wait_pinned(pinned, address)
    assert driver.pieces == {0: PIECE, PIECE: PIECE}
    assert driver.calls == 4, "it is not asked again for what follows"
    (text,) = told
    assert "stay unpinned" in text
    pinned.unpin(0)
    pinned.unpin(10 * PIECE)
    pinned.unpin(77)  # of no memory
    assert not driver.pieces


def test_copies_are_cut_where_pieces_meet_whether_or_not_they_are_registered_yet() -> None:
    driver = Driver()
    pinned = Pinning(driver.use_device, lambda _: None, driver)
    pinned.pin(4096, 3 * PIECE)
    assert pinned.cuts(4096, 500) == []
    assert pinned.cuts(4096, PIECE) == []
    assert pinned.cuts(4096 + 900, 2000) == [100, 1100]
    assert pinned.cuts(4096 + 2 * PIECE, PIECE) == []
    assert pinned.cuts(50, 500) == [], "of other memory"
    driver.let_go(3)
    pinned.unpin(4096)
    assert pinned.cuts(4096 + 900, 2000) == []
