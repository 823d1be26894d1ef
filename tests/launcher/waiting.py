from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["wait_until"]


def wait_until(condition: Callable[[], object], timeout_s: float) -> None:
    """Return as soon as another process has made it so; AssertionError when it never does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{condition} never came true"
        time.sleep(0.01)
