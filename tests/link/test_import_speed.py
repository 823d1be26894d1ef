"""Garbage is not collected during imports; whoever had turned collections off finds them off."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from rackrun.link.process.import_speed import without_collections


@pytest.fixture(autouse=True)
def collections_afterwards() -> Iterator[None]:
    yield
    gc.enable()


def test_collections_are_off_inside_and_on_again_afterwards() -> None:
    with without_collections():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_failed_import_leaves_them_on() -> None:
    with pytest.raises(ImportError), without_collections():
        raise ImportError
    assert gc.isenabled()


def test_who_had_turned_them_off_finds_them_off() -> None:
    gc.disable()
    with without_collections():
        pass
    assert not gc.isenabled()
