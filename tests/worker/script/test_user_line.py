"""Which line of the user's script an error or a notice points to."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Generator
from pathlib import Path

from rackrun.worker.script.user_line import user_frame, user_line

HERE = str(Path(__file__)).removeprefix(os.getcwd() + os.sep)


def paused() -> Generator[types.FrameType]:
    yield sys._getframe()


def test_without_a_frame_it_is_the_line_that_calls() -> None:
    assert user_line() == f"{HERE}:{sys._getframe().f_lineno}"
    assert user_frame() is sys._getframe()


def test_of_a_frame_it_is_the_line_where_that_one_stands_not_the_one_that_asks() -> None:
    generator = paused()
    frame = next(generator)
    assert frame.f_lineno != sys._getframe().f_lineno
    assert user_line(frame) == f"{HERE}:{paused.__code__.co_firstlineno + 1}"
    assert user_frame(frame) is frame
    generator.close()
