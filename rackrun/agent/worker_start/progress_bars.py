"""Progress bars of ranks other than 0 are kept from the terminal: N ranks show one bar, and its owner may change.

A bar is a line that is drawn again: tqdm does it with a carriage return, rich with codes that move the cursor. Whole
lines of every rank are shown.
"""

from __future__ import annotations

import io
import os
import re
import threading
from collections.abc import Callable

__all__ = ["BarFilter", "FilteredStream"]

_ERASE = re.compile(r"(?:\x1b\[\d*[AK])+")
_UP = re.compile(r"\x1b\[(\d*)A")
_HIDE, _SHOW = "\x1b[?25l", "\x1b[?25h"
_HELD_MAX = 1 << 14


class BarFilter:
    """Removes bars from the output of a process while ``has_bars`` is False.

    The beginning of a line is held until its end is there, because what follows shows whether it is a bar.
    """

    def __init__(self, has_bars: Callable[[], bool]) -> None:
        self._has_bars = has_bars
        self._held = ""
        self._in_frame = False
        """Whether what is held is the last line of a frame of several."""

    def feed(self, text: str) -> str:
        """Return what of ``text``, and of what was held before, is to be shown now."""
        if self._has_bars():
            held, self._held = self._held, ""
            return text if text.startswith("\r") else held + text  # a bar that was held is drawn again
        if not self._held and text.endswith("\n") and "\r" not in text and "\x1b" not in text:
            return text
        *lines, rest = text.replace("\r\n", "\n").split("\n")
        frame = sum(int(found or 1) for found in _UP.findall(text))  # of so many lines before the last
        if _HIDE in text:
            frame = len(lines)  # rich begins: all of it is a frame
        shown = []
        for number, line in enumerate(lines):
            whole = self._held + line
            alone = not line and number == 0  # the end of a bar comes by itself
            self._held = ""
            is_bar = number >= len(lines) - frame or (alone and self._in_frame)
            if not is_bar and (kept := _message_in(whole, alone=alone)) is not None:
                shown.append(kept + "\n")
        self._held += rest
        self._in_frame = frame > 0 or (self._in_frame and not lines)
        if len(self._held) > _HELD_MAX:
            long, self._held = self._held, ""
            shown += [] if "\r" in long else [long]
        return "".join(shown)

    def plain(self) -> str:
        """Return what is held of a line that has no sign of a bar so far."""
        if "\r" in self._held or "\x1b" in self._held:
            return ""
        return self.rest()

    def rest(self) -> str:
        """Return a last line without an end, at the end of the process."""
        held, self._held = self._held, ""
        return "" if "\r" in held or _HIDE in held else held


def _message_in(line: str, *, alone: bool) -> str | None:
    """Return what of a whole line is no bar; None: all of it is one. ``alone``: the line's end was written by itself."""
    if "\r" not in line:
        return None if line in (_HIDE, _SHOW) else line
    *_, before, last = line.split("\r")
    if before and not before.strip(" "):
        return last  # tqdm.write clears the bar with spaces first
    if not alone and (erased := _ERASE.match(last)):
        return last[erased.end() :]  # rich prints above its bars
    return None


class FilteredStream(io.TextIOWrapper):
    """A text stream whose ``bars`` keep bars back."""

    bars: BarFilter | None = None

    def write(self, text: str, /) -> int:
        """Write ``text`` without bars. Return its length."""
        if self.bars is None:
            return super().write(text)
        with _writing:
            if shown := self.bars.feed(text):
                super().write(shown)
        return len(text)

    def flush(self) -> None:
        """Write what is held back and has no sign of a bar: the script wants it to be seen now."""
        if self.bars is not None:
            with _writing:
                super().write(self.bars.plain())
        super().flush()

    def finish(self) -> None:
        """Write what is held back and is no bar."""
        if self.bars is not None:
            with _writing:
                super().write(self.bars.rest())
            super().flush()


_writing = threading.RLock()
"""The lock of all filters. A process that is forked while another thread writes has a new one."""


def _renew_lock() -> None:
    global _writing  # noqa: PLW0603 - of the process, as standard error is
    _writing = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)
