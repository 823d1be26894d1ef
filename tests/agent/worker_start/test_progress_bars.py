"""Of ranks that each print a progress bar, one is seen; what they say otherwise is all seen."""

from __future__ import annotations

import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rackrun.agent.worker_start.progress_bars import BarFilter, FilteredStream
from tests.variants import in_stories


class Printed:
    """What a rank has written, in these pieces, that is seen."""

    def __init__(self, *, main: bool = False) -> None:
        self.main = main
        self.filter = BarFilter(lambda: self.main)
        self.seen = ""

    def write(self, *pieces: str) -> str:
        for piece in pieces:
            self.seen += self.filter.feed(piece)
        return self.seen


def test_whole_lines_of_every_rank_are_seen() -> None:
    assert Printed().write("one\n", "two", "\n", "three\nfour\n") == "one\ntwo\nthree\nfour\n"
    assert Printed().write("ends as on Windows\r\n") == "ends as on Windows\n"


def test_a_bar_is_drawn_again_and_its_end_comes_by_itself() -> None:
    assert not Printed().write("\r  0%|", "\r 50%|#", "\r100%|##", "\n")


def test_what_is_printed_beside_a_bar_is_seen() -> None:
    bar, cleared = "\r 50%|#  |", "\r          \r"
    assert Printed().write(bar, cleared, "loss 1.5", "\n", bar) == "loss 1.5\n"


def test_the_bar_of_rank_0_is_seen_as_it_is() -> None:
    pieces = ["\r  0%|", "\r 50%|#", "\n"]
    assert Printed(main=True).write(*pieces) == "".join(pieces)


def test_a_rank_that_becomes_rank_0_shows_its_bar_from_then_on() -> None:
    rank = Printed()
    assert not rank.write("\r  0%|")
    rank.main = True
    assert rank.write("\r 10%|") == "\r 10%|"


def test_a_line_that_has_only_begun_is_not_lost() -> None:
    rank = Printed()
    assert not rank.write("loading ... ")
    assert rank.filter.rest() == "loading ... "
    assert not rank.write("\r 10%|")
    assert not rank.filter.rest()


def test_what_is_flushed_and_is_no_bar_is_seen_at_once() -> None:
    raw = io.BytesIO()
    stream = FilteredStream(raw, encoding="utf-8")
    stream.bars = BarFilter(lambda: False)
    print("loading ... ", end="", file=stream, flush=True)
    assert raw.getvalue() == b"loading ... "
    print("\r 10%|", end="", file=stream, flush=True)
    assert raw.getvalue() == b"loading ... "


def test_lines_of_several_threads_are_all_seen_once() -> None:
    raw = io.BytesIO()
    stream = FilteredStream(raw, encoding="utf-8")
    stream.bars = BarFilter(lambda: False)

    def talk(name: int) -> None:
        for line in range(300):
            stream.write(f"{name} {line}\n")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(talk, range(4)))
    stream.flush()
    assert sorted(raw.getvalue().decode().splitlines()) == sorted(
        f"{n} {line}" for n in range(4) for line in range(300)
    )


def test_a_line_without_an_end_is_not_held_for_ever() -> None:
    assert len(Printed().write("." * 20_000)) == 20_000


def test_frames_of_rich_are_bars_and_what_it_prints_above_them_is_not() -> None:
    hide, show, again = "\x1b[?25l", "\x1b[?25h", "\r\x1b[2K\x1b[1A\x1b[2K"
    rank = Printed()
    assert not rank.write(f"{hide}train 0%\ntest  0%", f"{again}train 5%\ntest  0%")
    assert rank.write(f"{again}a message\ntrain 9%\ntest  0%") == "a message\n"
    rank.seen = ""
    assert not rank.write(f"{again}train 100%\ntest  100%", "\n", show)


def test_a_real_bar_of_tqdm_is_not_seen_and_what_it_writes_is(monkeypatch: pytest.MonkeyPatch) -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # else a thread stays
    file = io.BytesIO()
    stream = FilteredStream(file, encoding="utf-8", write_through=True)
    stream.bars = BarFilter(lambda: False)
    for number in tqdm(range(5), file=stream, mininterval=0):
        if number == 2:
            tqdm.write("a message", file=stream)
    stream.finish()
    assert file.getvalue() == b"a message\n"


SCRIPT = """
import sys, time
import rackrun
@rackrun.elastic(global_batch_size=4, micro_batch_size=2, seed=1)
def main(run):
    for number in range(3):
        print(f"\\rbar {number}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(f"rank {run.rank}")
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("redirected", [True, *in_stories(False)])
def test_a_job_shows_the_bar_of_rank_0_and_logs_have_all(
    redirected: bool, run_rackrun: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "bars.py").write_text(SCRIPT)
    logs = ["--redirects", "2", "--log-dir", "logs"] if redirected else []
    ran = run_rackrun(["--standalone", "--nproc-per-node", "2", *logs, "bars.py"])
    assert ran.exit_code == 0, ran
    assert sorted(ran.stdout.splitlines()) == ["rank 0", "rank 1"]
    assert ran.stderr.count("bar 2") == (0 if redirected else 1)
    if redirected:
        files = list((tmp_path / "logs").rglob("stderr.log"))
        assert [path.read_bytes().count(b"bar 2") for path in files] == [1, 1]
