"""``repro.sh`` runs from anywhere, and knows what the run knew."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rackrun.chaos.runs.repro_script import write_repro

ECHO = """#!{python}
import json, os, sys
print(json.dumps({{"argv": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ)}}))
"""


def test_it_runs_from_another_folder_in_an_empty_shell_after_it_was_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, out = tmp_path / "the project", tmp_path / "out's"
    where.mkdir()
    out.mkdir()
    python = where / "python"
    python.write_text(ECHO.format(python=sys.executable))
    python.chmod(0o755)
    monkeypatch.chdir(where)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PYTHONPATH", "lib")
    monkeypatch.setenv("RACKRUN_KERNELS", "0")
    monkeypatch.setenv("RACKRUN_CHAOS_INSIDE", "never")
    monkeypatch.setenv("A_SECRET", "hush")
    command = ["--spares", "1", "train it.py", "--name", "it's $HOME"]
    write_repro(out / "repro.sh", "resolved.json", command, options=["--step-by-step"], env={"MODE": "a 'b' $c"})
    assert "hush" not in (out / "repro.sh").read_text()
    moved = out.rename(tmp_path / "moved, with spaces")
    run = subprocess.run(
        ["/bin/sh", str(moved / "repro.sh"), "--json"], cwd="/", env={}, capture_output=True, text=True, check=True
    )
    told = json.loads(run.stdout)
    assert told["argv"] == [
        *["-m", "rackrun.ctl", "chaos", "run", str(moved / "resolved.json"), "--step-by-step", "--json", "--"],
        *command,
    ]
    assert told["cwd"] == str(where)
    assert told["env"]["MODE"] == "a 'b' $c"
    assert told["env"]["RACKRUN_KERNELS"] == "0"
    assert "RACKRUN_CHAOS_INSIDE" not in told["env"]
    paths = told["env"]["PYTHONPATH"].split(":")
    assert str(where / "lib") in paths
    assert (Path(paths[0]) / "rackrun" / "__init__.py").is_file()
