"""Check before anything is started that a directory of the user can be made, or written to."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from rackrun.errors import UsageError

__all__ = ["check_directory"]


def check_directory(option: str, path: Path) -> None:
    """Raise UsageError when ``path``, of ``option``, is no directory that this user can make or write to.

    Leaves nothing behind. It does not look for room: a job must find its own checkpoints on a full disk too.
    """
    above = next(one for one in (path, *path.parents) if os.path.lexists(one))
    why = ""
    if not above.is_dir():
        why = f"{'it' if above == path else above} is no directory"
    elif not os.access(above, os.W_OK | os.X_OK):
        why = f"{'it' if above == path else above} cannot be written to"
    elif above != path:
        try:
            os.rmdir(tempfile.mkdtemp(prefix=".rackrun-", dir=above))
        except OSError as error:
            why = f"no directory can be made in {above}: {error.strerror or error}"
    if why:
        raise UsageError(f"{option} {path} cannot be used: {why}.", remedy="give a directory that can be written to.")
