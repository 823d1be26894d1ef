"""Refuses a commit message whose subject is missing or longer than 72 characters: ``python tools/check_subject.py FILE``, for a commit-msg hook."""

from __future__ import annotations

import sys
from pathlib import Path

SUBJECT_CHARS_MAX = 72
_SCISSORS = "# ------------------------ >8 ------------------------"
"""Git drops this line and what follows it (``git commit --verbose``)."""


def subject_of(message: str) -> str:
    """The first line that git keeps, without blanks around it; "" where there is none."""
    for line in message.partition(_SCISSORS)[0].splitlines():
        if line.strip() and not line.startswith("#"):
            return line.strip()
    return ""


def mistake_in(message: str) -> str:
    """What is wrong with the subject of ``message``, and what to do; "" where nothing is."""
    subject = subject_of(message)
    if not subject:
        return "the commit message has no subject. Remedy: say in one line what the commit does."
    if len(subject) > SUBJECT_CHARS_MAX:
        return (
            f"the subject of the commit message has {len(subject)} characters, {SUBJECT_CHARS_MAX} are allowed: {subject!r}. "
            "Remedy: one idea in the subject, the rest in the body after an empty line."
        )
    return ""


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: check_subject.py FILE")
    if found := mistake_in(Path(sys.argv[1]).read_text(encoding="utf-8")):
        sys.exit(found)
