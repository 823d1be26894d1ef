"""A child process for what would change this one for good: torch's default group, its threads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

__all__ = ["forked"]


def forked(work: Callable[[], Any]) -> Any:
    """What ``work`` returns, in a child: gloo's threads, and autograd's, would be in the way of whoever forks later."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return json.loads(said)
