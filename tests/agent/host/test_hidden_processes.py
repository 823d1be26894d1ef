"""Where /proc hides other users' processes, ours are still found, and ended."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LOOKS = """
import os, signal, subprocess, sys
from rackrun.agent.host import proc
try:
    open("/proc/1/stat").close()
    print("visible")
except PermissionError:
    print("hidden")
except FileNotFoundError:
    print("gone")
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
assert child.pid in proc.descendants(os.getpid())
assert child.pid in proc.descendants_now(os.getpid())
assert child.pid in proc.children(os.getpid())
assert proc.cpu_seconds(1) >= 0
proc.kill_session(child.pid)
assert child.wait() == -signal.SIGKILL
another = subprocess.Popen(["sleep", "600"])
assert proc.kill_tree(os.getpid())
assert another.wait() == -signal.SIGKILL
print("done")
"""


@pytest.mark.parametrize(("hidepid", "told"), [("1", "hidden"), ("2", "gone"), ("0", "visible")])
def test_processes_are_found_where_others_are_hidden(hidepid: str, told: str) -> None:
    """In a mount namespace of its own, as a user who is not root."""
    if os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("setpriv"):
        pytest.skip("needs root, unshare and setpriv")
    mount = f"mount -t proc -o hidepid={hidepid} proc /proc"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode != 0:
        pytest.skip("/proc cannot be mounted here")
    inside = f'{mount} && exec setpriv --reuid 65534 --regid 65534 --clear-groups "$@"'
    ran = subprocess.run(
        ["unshare", "-m", "sh", "-c", inside, "sh", sys.executable, "-c", LOOKS],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=100,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == [told, "done"]


def test_a_kernel_that_lets_nothing_of_others_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where none of the above can be had: every process but ours refuses."""
    import builtins

    from rackrun.agent.host import proc

    really = builtins.open
    own = f"/proc/{os.getpid()}/"

    def guarded(file: object, *arguments: object, **named: object) -> object:
        if isinstance(file, str) and file.startswith("/proc/") and file[6].isdigit() and not file.startswith(own):
            raise PermissionError(1, "hidden", file)
        return really(file, *arguments, **named)  # type: ignore[call-overload]

    monkeypatch.setattr(builtins, "open", guarded)
    assert proc.descendants(os.getpid()) == []
    assert proc.kill_tree(os.getpid())
    assert proc.descendants_now(1) == []
