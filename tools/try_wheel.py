"""Installs the built wheel into a new virtual environment, and runs a job from it: ``python tools/try_wheel.py [WHEEL]`` (by default the newest in dist/).

Nothing is downloaded: the new environment sees the packages of the environment that runs this script, behind its own. All commands run in a folder
of their own with a copy of the example, so whatever they find of rackrun is the wheel's. Exit code 0: the wheel is complete, and works.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
JOB = ("--nproc-per-node", "3", "--spares", "1", "small.py", "ddp", "fast", "16", "{out}")
"""Two ranks and a spare. ``{out}``: the folder of the run, by which the script waits for the fault."""
_DATA = (".c", ".css", ".j2", ".typed")
_LIMIT_S = 300

_IMPORT_ALL = """
import importlib, pkgutil, sys, rackrun
names = [found.name for found in pkgutil.walk_packages(rackrun.__path__, "rackrun.")]
for name in names:
    importlib.import_module(name)
at = {sys.modules[name].__file__ for name in names}
strangers = [path for path in at if not path.startswith(sys.argv[1])]
assert not strangers, strangers
print(len(names), "modules")
"""


class WheelError(Exception):
    """The wheel is not what it should be."""


def main() -> int:
    """The exit code: 0 all is well, 1 something is missing or does not work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", nargs="?", type=Path, help="default: the newest in dist/")
    given = parser.parse_args().wheel
    try:
        wheel = (given or newest_wheel(ROOT / "dist")).resolve()
        print(f"{wheel.name}: {check_files(wheel)} files, as in the repository")
        with tempfile.TemporaryDirectory(prefix="rackrun-wheel-") as folder:
            try_installed(wheel, Path(folder))
    except WheelError as error:
        print(f"try_wheel: {error}", file=sys.stderr)
        return 1
    print("the wheel works")
    return 0


def newest_wheel(folder: Path) -> Path:
    """Raises WheelError where there is none."""
    found = sorted(folder.glob("rackrun-*.whl"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise WheelError(f"there is no wheel in {folder}. Remedy: make wheel.")
    return found[-1]


def check_files(wheel: Path) -> int:
    """How many files of rackrun the wheel has. Raises WheelError where these are not the repository's, no more and no fewer."""
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = set(files_of_repository())
    wrong = [f"  not in the wheel: {name}" for name in sorted(expected - packed)]
    wrong += [f"  only in the wheel: {name}" for name in sorted(packed - expected)]
    if wrong:
        raise WheelError("\n".join([f"{wheel.name} has other files than the repository:", *wrong]))
    return len(packed)


def files_of_repository() -> Iterator[str]:
    """What a wheel has to contain, as paths in it. ``rackrun/chaos`` and two more are links to folders."""
    for folder, _, names in os.walk(ROOT / "rackrun", followlinks=True):
        for name in names:
            if name.endswith((".py", *_DATA)):
                yield str(Path(folder, name).relative_to(ROOT))


def try_installed(wheel: Path, folder: Path) -> None:
    """Raises WheelError for the first command that does not do what it should."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    env["XDG_STATE_HOME"] = str(folder / "state")
    python = install(wheel, folder / "venv", env)
    work = folder / "work"
    work.mkdir()
    for name in ("small.py", "rank_killed.yaml"):
        shutil.copy(ROOT / "examples" / "chaos" / name, work)
    rackrun, rackctl = str(python.with_name("rackrun")), str(python.with_name("rackctl"))
    version = f"rackrun {wheel.name.split('-')[1]}"

    expect(version, [rackrun, "--version"], work, env)
    expect(version, [str(python), "-m", "rackrun", "--version"], work, env)
    expect(version, [rackctl, "--version"], work, env)
    listed = said_by([rackctl, "--help"], work, env)
    commands = {line.split()[0] for line in listed.splitlines() if line.startswith("  ") and line.split()}
    if missing := {"status", "ckpt", "topology", "chaos", "plan"} - commands:
        raise WheelError(f"rackctl --help does not list {', '.join(sorted(missing))}.\n{listed}")
    expect("modules", [str(python), "-c", _IMPORT_ALL, str(folder)], work, env)
    print("rackrun --version, rackctl --help, all modules: as expected", flush=True)

    print(said_by([rackrun, "--standalone", *JOB[:-1]], work, env).rstrip(), flush=True)
    print(said_by([rackctl, "chaos", "run", "rank_killed.yaml", "--out", "report", "--", *JOB], work, env).rstrip())
    if not (work / "report" / "report.html").is_file():
        raise WheelError("rackctl chaos run has written no report.html.")


def install(wheel: Path, folder: Path, env: Mapping[str, str]) -> Path:
    """The Python of a new environment in ``folder`` that has the wheel, and behind it all packages of this one."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", "--quiet"]
    said_by([*pip, "--no-index", "--no-deps", str(wheel)], folder, env)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = Path(said_by([str(python), "-c", code], folder, env).strip())
    # Files named *.pth in the folders named here are not read, so an editable rackrun among these packages stays unseen.
    others = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    (own / "dependencies.pth").write_text("".join(f"{path}\n" for path in others))
    return python


def expect(word: str, command: list[str], folder: Path, env: Mapping[str, str]) -> None:
    """Raises WheelError where the command's output has not ``word`` in it."""
    said = said_by(command, folder, env)
    if word not in said:
        raise WheelError(f"{' '.join(command)} was to say {word!r}, and said:\n{said}")


def said_by(command: list[str], folder: Path, env: Mapping[str, str]) -> str:
    """Its standard output. Raises WheelError with all that it has said where its exit code is not 0."""
    try:
        ran = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=_LIMIT_S, check=True)
    except subprocess.CalledProcessError as error:
        said = f"{error.stdout}{error.stderr}"
        raise WheelError(f"{' '.join(command)} ended with exit code {error.returncode}:\n{said}") from error
    except subprocess.TimeoutExpired as error:
        raise WheelError(f"{' '.join(command)} was not done after {_LIMIT_S} s.") from error
    return ran.stdout


if __name__ == "__main__":
    sys.exit(main())
