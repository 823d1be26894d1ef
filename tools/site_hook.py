"""Hook of mkdocs: pages and files outside docs/ that the pages of docs/ link.

``make site`` builds the site from docs/. The repository's own pages (GLOSSARY.md, CHANGELOG.md, ...) become pages beside
those of docs/; docs/index.md takes the place of README.md. A linked file of the repository (an example, a module) is
copied to ``source/`` as text, and a linked folder becomes a page that lists its files. A link to what does not exist
stays as it is, and ``mkdocs build --strict`` fails on it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

__all__ = ["on_files", "on_page_markdown", "site_place"]  # mkdocs calls every function on_*

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("GLOSSARY.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
"""Pages at the top of the repository. On the site they lie beside those of docs/."""

_FENCED = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")


def on_files(files: Any, config: Any) -> Any:
    """Add the repository's pages, and every file and folder outside docs/ that a page links."""
    from mkdocs.structure.files import File

    for page in PAGES:
        files.append(File.generated(config, page, content=(ROOT / page).read_text(encoding="utf-8")))
    pages = [file for file in files if file.src_uri.endswith(".md")]
    wanted = {place for file in pages for place in _places(file.content_string, file.src_uri)}
    for place in sorted(place for place in wanted if place.startswith("source/")):
        path = ROOT / place.removeprefix("source/").removesuffix(".txt").removesuffix("/index.md")
        inside = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else []
        if inside:
            names = "".join(f"- [{file.name}]({file.name}.txt)\n" for file in inside)
            files.append(File.generated(config, place, content=f"# {path.relative_to(ROOT)}\n\n{names}"))
        for file in inside or [path]:
            uri = f"source/{file.relative_to(ROOT)}.txt"
            if files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, content=file.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite links that leave docs/, so that they lead to the pages and files that `on_files` added."""
    del config, files
    uri = page.file.src_uri
    if uri.startswith("source/"):
        return markdown
    parts = _FENCED.split(markdown)
    parts[::2] = [_LINK.sub(lambda match: match[1] + _moved(match[2], uri) + match[3], part) for part in parts[::2]]
    return "".join(parts)


def _places(markdown: str, uri: str) -> list[str]:
    """Return the places on the site to which the links of a page lead."""
    return [site_place(match[2], uri) for part in _FENCED.split(markdown)[::2] for match in _LINK.finditer(part)]


def _moved(target: str, uri: str) -> str:
    """Return the link as it is on the site, relative to the page ``uri``."""
    place = site_place(target, uri)
    return posixpath.relpath(place, posixpath.dirname(uri) or ".") if place else target


def site_place(target: str, uri: str) -> str:
    """Return where a link leads on the site; "": it is no relative link to a file of the repository."""
    if re.match(r"[a-z]+:", target):
        return ""
    folder = "" if uri in PAGES else posixpath.join("docs", posixpath.dirname(uri))
    path = posixpath.normpath(posixpath.join(folder, target))
    if path in PAGES:
        return path
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"source/{path}/index.md"
    return f"source/{path}.txt" if (ROOT / path).is_file() else ""
