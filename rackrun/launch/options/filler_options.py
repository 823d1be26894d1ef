"""Parsing and checks of ``--filler`` and ``--filler-grace``."""

from __future__ import annotations

import shlex
import shutil

from rackrun.errors import UsageError
from rackrun.protocol.agent_config import FillerConfig

__all__ = ["GRACE_S_MAX", "filler"]

GRACE_S_MAX = 0.4
"""Longest grace time in seconds, so that a filler is gone within a second of when its slot is needed."""


def filler(command: str | None, grace: float | None) -> FillerConfig:
    """Return the filler's configuration. Raises UsageError."""
    if command is None:
        if grace is not None:
            raise UsageError("--filler-grace is given without --filler.", remedy="say what is to run beside spares.")
        return FillerConfig()
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise UsageError(
            f"--filler {command!r}: {error}.", remedy="quote it as for a shell, which it is not."
        ) from error
    if not words or not words[0]:
        raise UsageError("--filler names no command.", remedy='for example --filler "python background.py".')
    if shutil.which(words[0]) is None:
        raise UsageError(
            f"--filler: there is no executable {words[0]}.",
            remedy="give its path, and chmod +x it; for a shell's pipes and variables: --filler \"sh -c '...'\".",
        )
    if grace is not None and not 0.0 <= grace <= GRACE_S_MAX:
        raise UsageError(f"--filler-grace {grace:g} is out of range.", remedy=f"give 0 to {GRACE_S_MAX:g} seconds.")
    return FillerConfig(command=words, grace_s=grace)
