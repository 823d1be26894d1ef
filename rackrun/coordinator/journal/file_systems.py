"""Detection of file systems that hosts share, on which SQLite's write-ahead log does not work because it needs shared
memory.

Sources: https://www.sqlite.org/wal.html ("all processes using a database must be on the same host computer; WAL does
not work over a network filesystem"); magic numbers of ``man 2 statfs`` and of each system's headers.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

__all__ = ["is_shared", "magic_of"]

_SHARED = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB2",
    0x5346414F: "AFS",
    0x6B414653: "kAFS",
    0x73757245: "Coda",
    0x01021997: "9P",
    0x00C36400: "Ceph",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x19830326: "BeeGFS",
    0xAAD7AAEA: "PanFS",
    0x013111A8: "IBRIX",
    0x01161970: "GFS2",
    0x7461636F: "OCFS2",
    0x65735546: "FUSE",
    0x20030528: "OrangeFS",
}
"""Names of shared file systems by magic number. FUSE may be local, but is as often an object store or sshfs."""

_libc = ctypes.CDLL(None, use_errno=True)


def magic_of(path: Path) -> int:
    """Return ``f_type`` of the file system that holds ``path``. Raises OSError."""
    room = ctypes.create_string_buffer(256)  # struct statfs: f_type comes first
    if _libc.statfs(os.fsencode(path), room) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(path))
    return ctypes.c_long.from_buffer(room).value & 0xFFFFFFFF


def is_shared(path: Path) -> str:
    """Return the name of the file system if other hosts share it; "" for a local one, and if it cannot be
    determined."""
    try:
        return _SHARED.get(magic_of(path), "")
    except OSError:
        return ""
