"""Read the command of a job under test: the launcher's options, the script, the script's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from rackrun.errors import UsageError
from rackrun.protocol.encodable import clean

__all__ = ["ENTER", "HOOKS", "arguments", "check_command", "check_script", "option", "options_of", "preloading"]

HOOKS, ENTER = "rackrun.chaos.inprocess.inprocess_faults", "rackrun.chaos.testbed.network.enter_host"
_WITHOUT_PY = ("-m", "--module", "--no-python", "--run-path")


def options_of(command: Sequence[str]) -> list[str]:
    """Return the words of the command before the script."""
    return list(takewhile(lambda word: not word.endswith(".py"), command))


def option(command: Sequence[str], name: str) -> str | None:
    """Return the value of the option ``name``, or None if the command does not have it.

    The option may be spelled with ``-`` or ``_`` and be followed by ``=`` or a space. "" is returned if it has no
    value.
    """
    options = options_of(command)
    for index, word in enumerate(options):
        said, equals, value = word.partition("=")
        if said.replace("_", "-") == name:
            return value if equals else " ".join(options[index + 1 : index + 2])
    return None


def check_command(command: Sequence[str]) -> None:
    """Raise `UsageError` for a command whose runs cannot be compared with each other."""
    options = options_of(command)
    if strange := next((word for word in command if clean(word) != word), None):
        raise UsageError(
            f"{clean(strange)} is no UTF-8, and the reports could not name it.", remedy="give it another name."
        )
    if not command or (len(options) == len(command) and not set(_WITHOUT_PY) & {*map(_dashed, command)}):
        raise UsageError("there is no script to run.", remedy="give rackrun's options and the script after --.")
    if option(command, "--out-dir") is not None:
        raise UsageError("--out-dir is chosen by the harness.", remedy="leave it out; see --out.")
    checkpoints = option(command, "--checkpoint-dir")
    if checkpoints is not None and "{out}" not in checkpoints:
        raise UsageError(
            "the run with faults would go on from the checkpoints of the one without.",
            remedy="say --checkpoint-dir {out}/checkpoints: each run gets a folder of its own.",
        )


def check_script(command: Sequence[str]) -> None:
    """Raise `UsageError` if the script does not exist, before anything starts."""
    script = next((word for word in command if word.endswith(".py")), None)
    if script is not None and "{" not in script and not Path(script).is_file():
        raise UsageError(f"there is no script {script}.", remedy="name it as seen from here, after rackrun's options.")


def arguments(command: Sequence[str], folder: Path) -> list[str]:
    """Return the command's words for a run in ``folder``, with the chaos hooks preloaded in the workers."""
    return preloading([word.replace("{out}", str(folder.resolve())) for word in command], HOOKS)


def preloading(words: list[str], module: str) -> list[str]:
    """Return the words with ``module`` added to those that ``--preload`` names."""
    for index, word in enumerate(words):
        if word == "--preload" and index + 1 < len(words):
            return [*words[: index + 1], f"{words[index + 1]},{module}", *words[index + 2 :]]
        if word.startswith("--preload="):
            return [*words[:index], f"{word},{module}", *words[index + 1 :]]
    return ["--preload", module, *words]


def _dashed(word: str) -> str:
    return word.replace("_", "-")
