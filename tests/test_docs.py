"""What the documentation points at exists: the files and headings that it links, and the code that it names."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.site_hook import site_place

ROOT = Path(__file__).resolve().parents[1]
AT_THE_TOP = ("README.md", "GLOSSARY.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
PAGES = sorted([*ROOT.glob("docs/**/*.md"), *(ROOT / name for name in AT_THE_TOP)])
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)

COLUMNS_MAX = 120
README_LINES_MAX = 130

PACKAGES = ("core", "coordinator", "agent", "worker", "frameworks", "link", "launch", "ctl", "pages", "protocol")
"""Pages may leave out ``rackrun/`` in front of these."""
FOLDERS = (*PACKAGES, "rackrun", "chaos", "checkpoint", "topology", "tests", "benchmarks", "examples", "tools", "docs")
PATH = re.compile(rf"(?:{'|'.join(FOLDERS)})/[\w./-]*")
DOTTED = re.compile(r"rackrun(?:\.\w+)+")

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NO_MODULES = set(PROJECT["entry-points"])
"""Names with dots that look like modules: groups of entry points."""


def prose(page: Path) -> str:
    """The text of a page without its fenced blocks, which hold output and scripts of users."""
    return FENCED.sub("", page.read_text(encoding="utf-8"))


def words_in_code(page: Path) -> Iterator[str]:
    for code in CODE.findall(prose(page)):
        for word in code.split():
            path, _, test = word.strip("(),;'\"").partition("::")
            yield path if path.startswith("tests/") else path + ("::" if test else "")


def anchors(page: Path) -> set[str]:
    """The names under which a link reaches the headings of a page, as GitHub makes them."""
    headings = HEADING.findall(prose(page))
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def path_exists(path: str) -> bool:
    below = path.partition("/")[0] in PACKAGES and (ROOT / "rackrun" / path).exists()
    return below or (ROOT / path).exists()


def name_exists(name: str) -> bool:
    """Whether it is a module, or a module and attributes whose names its source has."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:length])
        for source in (base.with_suffix(".py"), base / "__init__.py"):
            if source.is_file():
                text = source.read_text(encoding="utf-8")
                return all(re.search(rf"\b{attribute}\b", text) for attribute in parts[length:])
    return False


@every_page
def test_every_relative_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    dead = []
    for target in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            dead.append(target)
    assert not dead


@every_page
def test_every_path_and_module_that_a_page_names_exists(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        pytest.skip("it also names what is gone")
    words = set(words_in_code(page)) - NO_MODULES
    missing = [word for word in words if PATH.fullmatch(word) and not path_exists(word)]
    missing += [word for word in words if DOTTED.fullmatch(word) and not name_exists(word)]
    assert not sorted(missing)


@every_page
def test_lines_have_at_most_120_columns_rows_of_tables_excepted(page: Path) -> None:
    lines = enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
    too_long = [number for number, line in lines if len(line) > COLUMNS_MAX and not line.startswith("|")]
    assert not too_long


def test_the_readme_fits_two_screens() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= README_LINES_MAX


def test_the_readme_s_diff_makes_the_script_that_is_type_checked() -> None:
    """The diff of the README ends in the script of docs/convert_a_script.md, which tests/typing checks."""
    (diff,) = re.findall(
        r"^```diff\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    page = (ROOT / "docs" / "convert_a_script.md").read_text(encoding="utf-8")
    script = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0]
    assert [line[1:] for line in diff.splitlines() if not line.startswith("-")] == script.splitlines()


def test_every_script_of_the_readme_s_table_of_figures_exists() -> None:
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## Measured\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 10
    assert [row for row in rows if not re.search(r"`(benchmarks/[\w/.]+|rackctl chaos campaign)`", row[2])] == []


def test_the_index_and_the_menu_of_the_site_have_every_page() -> None:
    """``make site`` finds dead links. This finds pages that nobody can reach."""
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / target.partition("#")[0]).resolve() for target in LINK.findall(prose(index))}
    menu = re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    pages = {page for page in PAGES if page.name != "README.md" or page.parent.name == "decisions"}
    assert {page for page in pages if str(page.relative_to(ROOT)).removeprefix("docs/") not in menu} == set()
    assert {page for page in pages if page.parent.name != "decisions"} - linked <= {index}


@pytest.mark.parametrize(
    ("target", "page", "place"),
    [
        ("../GLOSSARY.md", "state.md", "GLOSSARY.md"),
        ("docs/state.md", "GLOSSARY.md", "state.md"),
        ("../scale.md", "decisions/README.md", "scale.md"),
        ("README.md", "CONTRIBUTING.md", "index.md"),
        ("../examples/policy.py", "write_a_policy.md", "source/examples/policy.py.txt"),
        ("../examples/racks", "rack.md", "source/examples/racks/index.md"),
        ("../examples/nothing.py", "rack.md", ""),
        ("https://example.org/docs/state.md", "rack.md", ""),
    ],
)
def test_a_link_leads_to_its_place_on_the_site(target: str, page: str, place: str) -> None:
    assert site_place(target, page) == place


def test_what_does_not_exist_is_found() -> None:
    assert path_exists("worker/membership/decisions/gate.py")
    assert not path_exists("worker/membership/gates.py")
    assert name_exists("rackrun.core.machine.control_plane.ControlPlane")
    assert not name_exists("rackrun.core.machine.control_plane.ControlPlanes")
    assert not name_exists("rackrun.core.machines")
