"""Who is main, and what follows the rank: a spare is nobody's main, and what one rank alone is to have goes with the rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from rackrun.worker.loop.run import Run
from tests.worker.harness import Ended, moments, say
from tests.worker.scripts import STEPS, adam, ddp, fit, net

Train = Callable[..., Ended]


class Writer:
    """As one of TensorBoard's: a file of its own for each."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"{os.getpid()}.log").open("a", buffering=1)

    def add_scalar(self, name: str, value: float, step: int) -> str:
        self._file.write(f"{step}\n")
        return f"{name} {value}"

    def close(self) -> None:
        self._file.write("closed\n")
        self._file.close()


def followed(folder: Path, sharded: bool = False) -> Callable[[Run], None]:
    """A script that asks who is main before the steps, as frameworks do, and later; with a writer that follows rank 0."""

    def main(run: Run) -> None:
        asked = [run.rank == 0, dist.get_rank() == 0, os.environ["RANK"] == "0", run.is_main]
        begun_as_spare = not run.generation
        model = net() if sharded else ddp(run)
        if sharded:
            fully_shard(model)
        writer = run.main_only(lambda: Writer(folder))
        joined: list[tuple[int, int, bool]] = []
        run.on_join(lambda: joined.append((run.rank, run.world_size, run.is_main)))
        seen: list[int] = []

        def between(number: int) -> None:
            writer.add_scalar("loss", 0.0, number)
            seen.append(number)

        fit(run, model, adam(model), between=between)
        env = [int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])]
        say(asked=asked, spare=begun_as_spare, joined=joined, env=env, now=[run.rank, run.world_size], main=run.is_main)

    return main


def written(folder: Path) -> list[str]:
    return [line for path in sorted(folder.iterdir()) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("ranks", [3, 1])
def test_there_is_one_main_before_and_after_a_swap(ranks: int, lost: int, train: Train, tmp_path: Path) -> None:
    if lost >= ranks:
        pytest.skip("no such rank")
    reference = train(followed(tmp_path), ranks=ranks)
    folder = tmp_path / "with a loss"
    folder.mkdir()
    ended = train(followed(folder), ranks=ranks, kill={lost: moments(reference, lost, "main")[0]})
    assert ended.exit_code == 0, ended
    (newcomer,) = [rank for rank, said in ended.said.items() if said["spare"]]
    assert newcomer == lost
    for rank, said in ended.said.items():
        assert said["joined"] == [[rank, ranks, rank == 0]]
        assert said["env"] == said["now"] == [rank, ranks]
        assert said["main"] == (rank == 0)
        if not said["spare"]:
            assert said["asked"] == [rank == 0] * 4
        elif ranks > 1:  # in a world of one rank there is no other to be
            assert said["asked"] == [False] * 4
    steps = {int(line) for line in written(folder) if line.isdigit()}
    gaps = set(range(STEPS)) - steps
    assert len(gaps) <= (lost == 0), (
        "the writer has followed rank 0; code outside steps runs on a newcomer from its step on"
    )
    assert len(list(folder.iterdir())) == (2 if lost == 0 else 1), "only who is main makes one"


def test_survivors_are_told_of_their_new_place(train: Train, tmp_path: Path) -> None:
    """Rank 0 is lost and not replaced: rank 1 is main from then on, with a writer."""
    reference = train(followed(tmp_path), ranks=2, spares=0)
    folder = tmp_path / "with a loss"
    folder.mkdir()
    how: dict[str, Any] = {"min_ranks": 1, "policy": "swap,shrink,wait", "ranks": 2, "spares": 0}
    ended = train(followed(folder), kill={0: moments(reference, 0, "place")[0]}, **how)
    assert ended.exit_code == 0, ended
    # Who comes back for rank 0 may become rank 1, too.
    (told,) = [said for said in ended.said.values() if not said["spare"]]
    assert told["joined"][:2] == [[1, 2, False], [0, 1, True]], told
    for said in ended.said.values():
        assert said["joined"][-1][:2] == said["env"] == said["now"], said
    assert len({int(line) for line in written(folder) if line.isdigit()}) >= STEPS - 1


def test_what_follows_the_rank_leaves_who_is_not_main_any_more(tmp_path: Path) -> None:
    from rackrun.worker.script.rank_changes import MainOnly

    main = [True]
    writer: Any = MainOnly(lambda: Writer(tmp_path), lambda: main[0])
    assert writer.add_scalar("a", 1.0, 1) == "a 1.0"
    main[0] = False
    assert writer.add_scalar("a", 1.0, 2) is None
    assert not writer
    main[0] = True
    with writer:
        writer.add_scalar("a", 1.0, 3)
    assert written(tmp_path) == ["1", "closed", "3", "closed"]


def test_who_takes_rank_0_is_told_what_it_has_not(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    """A writer that was made before the steps, by who was main then."""

    def main(run: Run) -> None:
        model = ddp(run)
        writer = sys.stderr if run.is_main else None
        fit(run, model, adam(model))
        say(writes=writer is not None)

    reference = train(main, ranks=2)
    capfd.readouterr()
    ended = train(main, ranks=2, kill={0: moments(reference, 0, "told")[0]})
    assert ended.exit_code == 0, ended
    told = [line for line in capfd.readouterr().err.splitlines() if "run.main_only" in line]
    line = main.__code__.co_firstlineno + 2
    assert all(f"test_on_join.py:{line}" in one for one in told), told
    assert ["has taken rank 0" in one for one in told] == [False, True], "at the start on rank 0, and on who takes it"


def test_what_is_not_kept_is_not_told_of(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    def main(run: Run) -> None:
        if run.is_main:
            print("begins")
        model = ddp(run)
        fit(run, model, adam(model))

    assert train(main, ranks=2, spares=0).exit_code == 0
    assert "run.main_only" not in capfd.readouterr().err
