"""``rackctl`` has the commands that other packages bring."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rackrun.ctl.plugin_commands import GROUP


def test_a_package_brings_a_command_by_an_entry_point(tmp_path: Path) -> None:
    (tmp_path / "hello_rack.py").write_text(
        "import typer\n"
        "hello = typer.Typer(name='hello', help='Says hello.')\n"
        "@hello.command()\n"
        "def rack(name: str) -> None:\n"
        "    print('hello', name)\n"
        "@hello.command()\n"
        "def tray() -> None: ...\n"
    )
    folder = tmp_path / "hello_rack-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: hello-rack\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[{GROUP}]\nhello = hello_rack:hello\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])

    def rackctl(*words: str) -> str:
        command = [sys.executable, "-m", "rackrun.ctl", *words]
        return subprocess.run(
            command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
        ).stdout

    assert rackctl("hello", "rack", "seven") == "hello seven\n"
    listed = rackctl("--help")
    assert all(name in listed for name in ("chaos", "plan", "hello", "Says hello."))
