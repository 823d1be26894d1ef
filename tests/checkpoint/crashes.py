"""``make crashes``: thousands of crashes of jobs that save, replicate, commit, flush, collect and restore, and what was restored.

Series of some fifty crashes over one folder each, each with a seed of its own: ``kind:seed`` given as the only argument plays
one series again. RACKRUN_CRASHES says how many crashes (10,000), RACKRUN_CRASHES_SEED where the seeds begin.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pytest

from rackrun.protocol import crash_points
from tests.checkpoint.crash_forks import Forks
from tests.checkpoint.crash_manager import Managers, install
from tests.checkpoint.crash_trays import Trays

__all__ = ["EVERY_POINT", "Tally", "run", "series"]

SERIES = 50
FORKS_SHARE = 0.04
MANAGERS_SHARE = 0.48
EVERY_POINT = ("arena.", "save.", "replicate.", "commit.", "flush.", "durable.", "retention.", "restore.", "close.")


class Lives(Protocol):
    def live(self) -> str: ...
    def mishap(self) -> str: ...
    def close(self) -> None: ...


class Tally:
    def __init__(self) -> None:
        self.struck: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.mishaps: Counter[str] = Counter()
        self.lives = 0

    def never(self) -> list[str]:
        return [name for name in crash_points.CRASH_POINTS if name.startswith(EVERY_POINT) and not self.struck[name]]

    def __str__(self) -> str:
        points = ", ".join(f"{name} {self.struck[name]}" for name in sorted(self.struck))
        mishaps = ", ".join(f"{what} {count}" for what, count in sorted(self.mishaps.items()) if what)
        kinds = ", ".join(f"{count} of {kind}" for kind, count in self.kinds.items())
        return (
            f"{self.struck.total()} crashes ({kinds}) in {self.lives} lives; between them {mishaps}.\nAt {points}.\n"
            "0 torn, 0 mixed, 0 unverified, 0 older than the last commit."
        )


def series(kind: str, seed: int, crashes: int, tally: Tally) -> None:
    """Raises AssertionError, with the story, at the first restore that must not be."""
    folder = Path(tempfile.mkdtemp(prefix="rackrun-test-crashes-", dir="/dev/shm"))
    struck = 0
    lives: Lives | None = None
    try:
        with pytest.MonkeyPatch.context() as patch:
            if kind == "manager":
                install(patch)
            kinds: dict[str, Callable[[Path, int], Lives]] = {"manager": Managers, "trays": Trays, "forks": Forks}
            lives = kinds[kind](folder / "job", seed)
            while struck < crashes:
                where = lives.live()
                tally.lives += 1
                if where:
                    struck += 1
                    tally.struck[where] += 1
                    tally.kinds[kind] += 1
                tally.mishaps[lives.mishap()] += 1
            lives.live()  # what the last crash has left
    except BaseException as error:
        error.add_note(f"again: make crashes ARGS={kind}:{seed}")
        raise
    finally:
        if lives is not None:
            lives.close()
        shutil.rmtree(folder)


def run(crashes: int, seed: int) -> Tally:
    tally = Tally()
    forks, managers = round(crashes * FORKS_SHARE), round(crashes * MANAGERS_SHARE)
    for kind, count in (("manager", managers), ("forks", forks), ("trays", crashes - managers - forks)):
        for first in range(0, count, SERIES):
            series(kind, seed + first // SERIES, min(SERIES, count - first), tally)
    return tally


def main() -> None:
    if len(sys.argv) > 1:
        kind, _, number = sys.argv[1].partition(":")
        tally = Tally()
        series(kind, int(number), SERIES, tally)
        print(tally)
        return
    crashes = int(os.environ.get("RACKRUN_CRASHES", "10000"))
    seed = int(os.environ.get("RACKRUN_CRASHES_SEED", "1"))
    print(f"{crashes} crashes, seeds from {seed}", flush=True)
    began = time.monotonic()
    tally = run(crashes, seed)
    print(f"{tally}\n{time.monotonic() - began:.0f} s")
    if crashes >= 10_000 and (never := tally.never()):
        sys.exit(f"never struck at {', '.join(never)}")


if __name__ == "__main__":
    main()
