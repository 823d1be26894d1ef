"""On the path of a launcher: its agents reach the coordinator through the port ``RACKRUN_TEST_PROXY`` of this host."""

from __future__ import annotations

import os
import sys

if sys.orig_argv[1:2] == ["-m"] and sys.orig_argv[2] in {"rackrun", "rackrun.agent"}:
    from rackrun.agent.tray.uplink import Uplink

    Uplink._url = lambda *_, **__: f"http://127.0.0.1:{os.environ['RACKRUN_TEST_PROXY']}/agent"  # type: ignore[method-assign]
