"""A command line that rackctl does not understand is refused in one line, with the help that explains it; output that
nobody reads any more ends it quietly."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

from rackrun.ctl.main import main
from tests.chaos.recorded import write_run
from tests.chaos.report.test_report import line_of, write_tally

Rackctl = Callable[..., Any]


@pytest.mark.parametrize(
    ("arguments", "what", "remedy"),
    [
        (("chaos", "run", "--seed", "x", "plan.yaml", "--", "train.py"), "'--seed': ", "rackctl chaos run --help"),
        (("chaos", "run", "--limit", "0", "plan.yaml", "--", "train.py"), "'--limit': ", "rackctl chaos run --help"),
        (("chaos", "soak", "--minutes", "", "--", "train.py"), "'--minutes': ", "rackctl chaos soak --help"),
        (("chaos", "run"), "PLAN", "rackctl chaos run --help"),
        (("shrink", "--to", "half"), "'--to': ", "rackctl shrink --help"),
        (("ckpt", "gc", "--keep-last", "1e99", "here"), "'--keep-last': ", "rackctl ckpt gc --help"),
        (("status", "--nothing"), "--nothing", "rackctl status --help"),
        (("status", "one", "two", "three"), "two three", "rackctl status --help"),
        (("nothing",), "'nothing'", "rackctl --help"),
    ],
)
def test_what_is_not_understood_is_refused_in_one_line(
    rackctl: Rackctl, arguments: tuple[str, ...], what: str, remedy: str
) -> None:
    said = rackctl(*arguments)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("rackctl: error: ")
    assert what in said.err
    assert said.err.endswith(f" Remedy: see {remedy}.\n")


def test_without_a_command_the_help_is_shown(rackctl: Rackctl) -> None:
    said = rackctl()
    assert said.code == 2
    assert "Commands:" in said.out + said.err


@contextlib.contextmanager
def without_reader() -> Iterator[TextIO]:
    """The end of a pipe that nobody reads any more, as standard output is after ``| head -1``."""
    reads, writes = os.pipe()
    os.close(reads)
    output = os.fdopen(writes, "w")
    try:
        yield output
    finally:
        with contextlib.suppress(BrokenPipeError):
            output.close()


@pytest.mark.parametrize(
    "command",
    [
        ("--version",),
        ("--help",),
        ("report", "RUN"),
        ("report", "RUN", "--json"),
        ("chaos", "report", "CHAOS"),
        ("chaos", "campaign", "--seeds", "0:1", "--tally", "TALLY", "--", "train.py", "{wrap}"),
    ],
)
def test_a_command_whose_output_has_lost_its_reader_ends_quietly_as_by_sigpipe(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    chaos = write_run(tmp_path / "out")
    tally = write_tally(tmp_path / "tally.jsonl", line_of(0))
    places = {"RUN": chaos / "faulted" / "run", "CHAOS": chaos, "TALLY": tally}
    monkeypatch.setattr(sys, "argv", ["rackctl", *(str(places.get(word, word)) for word in command)])
    with without_reader() as output:
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 141
    assert not [line for line in capfd.readouterr().err.splitlines() if not line.startswith("chaos: ")]


def test_the_process_too_says_nothing_when_its_output_has_lost_its_reader() -> None:
    with without_reader() as output:
        ended = subprocess.run(
            [sys.executable, "-m", "rackrun.ctl", "--version"], stdout=output, stderr=subprocess.PIPE, check=False
        )
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_without_standard_output_a_command_ends_as_with_it() -> None:
    for command, code in (("--version", 0), ("nonsense", 2)):
        ended = subprocess.run(
            ["sh", "-c", 'exec "$0" -m rackrun.ctl "$1" >&-', sys.executable, command],
            stderr=subprocess.PIPE,
            check=False,
        )
        assert (ended.returncode, b"Traceback" in ended.stderr) == (code, False)


def test_another_pipe_that_breaks_is_no_lost_reader(rackctl: Rackctl, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("rackrun.ctl.main._refuse_remote", breaks)
    said = rackctl("status")
    assert said.code == 70
    assert "internal error: BrokenPipeError" in said.err


def test_output_for_which_there_is_no_room_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["rackctl", "--version"])
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 70
    assert "there is no room for the output" in capfd.readouterr().err
