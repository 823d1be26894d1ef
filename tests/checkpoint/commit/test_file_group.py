"""A process group that meets in a file (``init_method="file://..."``) carries saves as one that meets at a server does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from rackrun.checkpoint import CheckpointManager
from rackrun.checkpoint.commit.peers import Peers, PeersGone
from tests.checkpoint.manager.test_manager import Training, manager, shm

__all__ = ["manager", "shm"]


def test_saves_go_through_a_file_and_leave_it_to_its_group(
    manager: Callable[..., CheckpointManager], tmp_path: Path
) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        training, one = Training(), manager(durable_every=2)
        one.prepare(training.state)
        assert one.restore() is None
        for step in range(1, 5):
            training.step()
            handle = one.save(step, durable=step == 4)
            assert handle.committed.result(), handle
        assert handle.durable.result(), handle
        assert (tmp_path / "meeting").exists()
        one.close()
        assert (tmp_path / "meeting").exists()
    finally:
        dist.destroy_process_group()


def test_an_answer_that_comes_after_the_files_own_second_is_heard(tmp_path: Path) -> None:
    store = dist.PrefixStore("a", dist.PrefixStore("b", dist.FileStore(str(tmp_path / "meeting"), 2)))
    first, second = Peers(store, 0, 2), Peers(store, 1, 2)
    late = threading.Timer(1.5, lambda: second.another().say("key", "late"))
    late.start()
    assert first.another().hear(["key"], str, seconds=60.0) == ["late"]
    late.join()
    with pytest.raises(PeersGone, match="did not answer"):
        first.hear(["never"], str, seconds=0.1)
    first.forget(["key"])
