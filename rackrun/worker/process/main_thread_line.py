"""Finds the line of the script at which the main thread is, for messages."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from types import FrameType

import torch

__all__ = ["place_of_main_thread"]

_LIBRARIES = tuple(
    os.path.join(folder, "")
    for folder in {
        os.path.dirname(os.path.dirname(os.path.dirname(__file__))),  # rackrun
        os.path.dirname(str(torch.__file__)),
        sysconfig.get_path("stdlib"),
    }
)
_FRAMES_MAX = 200


def place_of_main_thread() -> str:
    """Return text like ``train.py:31 in evaluate``, with the innermost function where that is not the script's; "" when
    it is unknown."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return ""
    script = _innermost_of_script(frame)
    if script is None or script is frame:
        return _name(frame)
    return f"{_name(script)}, in {_module(frame)}.{frame.f_code.co_name}"


def _innermost_of_script(frame: FrameType | None) -> FrameType | None:
    for _ in range(_FRAMES_MAX):
        if frame is None:
            return None
        file = frame.f_code.co_filename
        if not file.startswith(("<", *_LIBRARIES)) and f"{os.sep}site-packages{os.sep}" not in file:
            return frame
        frame = frame.f_back
    return None


def _name(frame: FrameType) -> str:
    file = frame.f_code.co_filename
    here = os.path.join(os.getcwd(), "")
    return f"{file.removeprefix(here)}:{frame.f_lineno} in {frame.f_code.co_name}"


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "?"))
