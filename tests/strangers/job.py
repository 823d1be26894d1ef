"""One run of one script under rackrun: started with its orders, watched, and ended with all that it has started."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.strangers.places import find_places

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE / "scripts"
ROOT = HERE.parents[1]
MARK = "STRANGERS_RUN"


@dataclass(frozen=True)
class Fault:
    """What happens to whoever is ``rank`` when it comes to ``line`` for the ``visit``-th time in ``unit``."""

    id: int
    what: str
    rank: int
    unit: int
    line: int
    visit: int
    place: str
    delay_s: float = 0.0
    continue_s: float | None = None

    def __str__(self) -> str:
        when = f"+{1000 * self.delay_s:.0f}ms" if self.delay_s else ""
        goes_on = f" for {self.continue_s:.1f}s" if self.continue_s is not None else ""
        return f"{self.what}{goes_on} rank {self.rank} at {self.unit}:{self.line}#{self.visit}{when} ({self.place})"


@dataclass(frozen=True)
class Setting:
    """What the comment ``# strangers: key=value ...`` of a script says."""

    ranks: int = 3
    expect: str = "equal"
    """equal; said: a mistake, which a run without faults has to refuse or to name."""
    shrinks: bool = False
    """Whether a run without spares is to be compared: as a whole with ``reduction="exact"``, else by magnitudes."""
    options: tuple[str, ...] = ()
    plain: bool = False
    """A torchrun script, which knows nothing of rackrun."""


@dataclass
class Outcome:
    code: int | None
    """None: it was ended because it took too long."""
    seconds: float
    output: str
    lines: list[dict[str, Any]] = field(default_factory=list)
    struck: list[int] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """What was still there when the launcher had ended: processes, files in /dev/shm."""


def setting_of(script: Path) -> Setting:
    found = re.search(r"^# strangers: (.*)$", script.read_text(), re.MULTILINE)
    words = dict(word.split("=", 1) for word in found[1].split()) if found else {}
    return Setting(
        ranks=int(words.get("ranks", 3)),
        expect=words.get("expect", "equal"),
        shrinks=words.get("shrinks") == "yes",
        options=tuple(words["options"].split(",")) if "options" in words else (),
        plain=words.get("plain") == "yes",
    )


def run_job(
    script: Path,
    out: Path,
    *,
    spares: int,
    faults: tuple[Fault, ...] = (),
    profile: bool = False,
    limit_s: float = 120.0,
) -> Outcome:
    """``out`` is made, and afterwards has ``said.jsonl``, ``output.txt``, ``profile.jsonl`` and rackrun's journal."""
    setting = setting_of(script)
    shutil.rmtree(out, ignore_errors=True)
    for folder in (out, out / "tmp"):
        folder.mkdir(parents=True)
    environ = {
        key: value for key, value in os.environ.items() if not key.startswith(("RACKRUN_", "PET_", "STRANGERS_"))
    }
    environ |= {
        MARK: uuid.uuid4().hex,
        "TMPDIR": str(out / "tmp"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [str(Path(sys.executable).with_name("rackrun")), "--standalone", "--out-dir", str(out / "run")]
    command += ["--nproc-per-node", str(setting.ranks + spares), "--spares", str(spares), *setting.options]
    if faults or profile:
        orders = asdict(find_places(script)) | {"script": str(script), "out": str(out), "profile": profile}
        orders |= {"faults": [asdict(fault) for fault in faults]}
        del orders["of"]
        (out / "orders.json").write_text(json.dumps(orders))
        environ["STRANGERS_ORDERS"] = str(out / "orders.json")
        command += ["--preload", "tests.strangers.inside"]
    command += [str(script), str(out / "said.jsonl")]
    (out / "command.txt").write_text(" ".join(command) + "\n")
    own_shm = os.geteuid() == 0 and shutil.which("unshare") is not None
    if own_shm:  # a /dev/shm of its own: what is left there is this job's (but the lock of a user, which stays)
        inner = 'mount -t tmpfs tmpfs /dev/shm && "$@"; code=$?; find /dev/shm ! -type d ! -path "*/rackrun-*/lock" > "$0"; exit $code'
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", inner, str(out / "shm.txt"), *command]
    begun = time.monotonic()
    with open(out / "output.txt", "wb") as output:
        process = subprocess.Popen(
            command,
            env=environ,
            cwd=out,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = watch(process, out, faults, begun + limit_s)
        finally:
            seconds = time.monotonic() - begun
            left = end_all(environ[MARK], process) if process.poll() is None else wait_for_last(environ[MARK])
    shm = out / "shm.txt"
    if code is not None and shm.exists():
        left += shm.read_text().split()
    shutil.rmtree(out / "tmp", ignore_errors=True)
    said = out / "said.jsonl"
    lines = [json.loads(line) for line in said.read_text().splitlines()] if said.exists() else []
    struck = [fault.id for fault in faults if (out / f"struck-{fault.id}").exists()]
    return Outcome(
        code, seconds, (out / "output.txt").read_text(errors="replace"), lines, struck, left if code is not None else []
    )


def watch(process: subprocess.Popen[bytes], out: Path, faults: tuple[Fault, ...], deadline: float) -> int | None:
    """The exit code; None at the deadline. Who was stopped for a while is woken here."""
    waking = [fault for fault in faults if fault.continue_s is not None]
    while time.monotonic() < deadline:
        try:
            return process.wait(0.02 if waking else max(deadline - time.monotonic(), 0.02))
        except subprocess.TimeoutExpired:
            pass
        for fault in list(waking):
            struck = out / f"struck-{fault.id}"
            if not struck.exists():
                continue
            row = json.loads(struck.read_text())
            if time.monotonic() >= row["at"] + fault.delay_s + (fault.continue_s or 0.0):
                waking.remove(fault)
                if carries(row["pid"], (MARK, process_mark(process.pid))):
                    os.kill(row["pid"], signal.SIGCONT)
    return None


def process_mark(pid: int) -> str:
    return environ_of(pid).get(MARK, "")


def environ_of(pid: int) -> dict[str, str]:
    try:
        rows = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict(row.decode(errors="replace").split("=", 1) for row in rows if b"=" in row)


def carries(pid: int, item: tuple[str, str]) -> bool:
    return bool(item[1]) and environ_of(pid).get(item[0]) == item[1]


def marked(mark: str) -> list[int]:
    """Live processes of the run that carries ``mark``."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return [pid for pid in pids if carries(pid, (MARK, mark))]


def end_all(mark: str, process: subprocess.Popen[bytes]) -> list[str]:
    while pids := marked(mark):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.poll()
        time.sleep(0.02)
    process.wait()
    return []


def wait_for_last(mark: str) -> list[str]:
    """Names of the processes that are still there three seconds after the launcher's end; they are ended."""
    deadline = time.monotonic() + 3.0
    while (pids := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    names = []
    for pid in pids:
        try:
            names.append(f"process {pid}: {Path(f'/proc/{pid}/cmdline').read_text().replace(chr(0), ' ')[:80]}")
            os.kill(pid, signal.SIGKILL)
        except OSError:
            continue
    return names
