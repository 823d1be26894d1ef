"""Render templates of pages and pictures. Every value is escaped, and a value that is missing is an error."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["render", "write"]

_HERE = Path(__file__).parent


def render(template: Path, /, **values: object) -> str:
    """Return the text of a template. ``template``: its file; it may use the files beside it and those of this room."""
    return _environment(template.parent).get_template(template.name).render(values)


def write(path: Path, template: Path, /, **values: object) -> None:
    """Write the text of a template to ``path``, which has its old content until the new one is complete.

    Bytes of a file's name that are not UTF-8 are written as escapes.

    Raises `OSError` when the folder cannot be written.
    """
    partial = path.with_name(f".{path.name}.part")
    partial.write_text(render(template, **values), encoding="utf-8", errors="backslashreplace")
    partial.replace(path)


@cache
def _environment(folder: Path) -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # rackctl has commands that need no page

    return Environment(
        loader=FileSystemLoader([folder, _HERE]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
