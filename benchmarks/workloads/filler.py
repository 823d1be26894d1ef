"""A filler of the worst kind: deaf to SIGTERM, computing, with 256 MB, children in its group and a daemon outside of it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def spin() -> None:
    number = 0
    while True:
        number += 1


signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    spin()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        spin()
    os._exit(0)
held = bytearray(b"x") * (256 << 20)
Path(sys.argv[1], "filler-" + os.environ["RACKRUN_FILLER"].replace("/", ".")).touch()
spin()
