"""What the launcher knows of its agents' ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from rackrun.launch.run.local_agents import LocalAgents
from rackrun.protocol.ids import TrayId

TRAY = TrayId("tray-00")


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import os; os.kill(os.getpid(), 9)", "its agent was killed by SIGKILL"),
        ("raise SystemExit(7)", "its agent exited with code 7"),
        ("import os; os.kill(os.getpid(), 40)", "its agent was killed by signal 40"),
    ],
)
def test_how_an_agent_ended_is_known_before_its_end_is_seen_by_the_loop(code: str, told: str) -> None:
    agents = LocalAgents([])
    with subprocess.Popen([sys.executable, "-c", code]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        agents._pids[TRAY] = ended.pid
        assert agents.how_ended(TRAY, ended.pid) == told
        assert agents.how_ended(TRAY, ended.pid + 1) == "", "another agent acts for the tray"
        assert agents.how_ended(TrayId("tray-01"), ended.pid) == ""
        assert agents.how_ended(TRAY, ended.pid) == told, "it is not reaped"


def test_nothing_is_said_of_an_agent_that_runs() -> None:
    agents = LocalAgents([])
    with subprocess.Popen(["sleep", "600"]) as running:
        agents._pids[TRAY] = running.pid
        assert agents.how_ended(TRAY, running.pid) == ""
        running.send_signal(signal.SIGKILL)
