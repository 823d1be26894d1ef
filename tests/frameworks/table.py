"""Writes docs/frameworks.md: what works with which framework, and what is refused, as the tests show it.

``python -m tests.frameworks.table`` reads ``@pytest.mark.feature(framework, feature, how=...)`` from all tests; ``how`` is
``works``, the default, or ``refused``. `tests/frameworks/test_table.py` fails when the page says something else.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["PAGE", "Feature", "features", "page"]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "frameworks.md"
PACKAGES = {
    "HF Trainer": ("transformers", "accelerate"),
    "TRL": ("trl", "transformers"),
    "PEFT": ("peft", "transformers"),
    "Accelerate": ("accelerate",),
    "Lightning": ("lightning",),
    "Fabric": ("lightning",),
    "Megatron-Core": ("megatron-core",),
    "torchtitan": ("torchtitan",),
    "Streams": ("datasets", "torchdata", "webdataset"),
    "Plain loops": (),
}
"""Framework -> the packages whose versions are named. The page has the frameworks in this order."""
TRIED = {"torch": "2.13.0"}
"""Versions of packages that requirements-dev.lock does not name."""
HOW = ("works", "refused")
_TEXT = """# Frameworks: what works, and what is refused

This page is written by `python -m tests.frameworks.table` from the tests: each line names the test that shows it.
*Works* means the same weights and the same logs as without rackrun or without a fault, to the bit. *Refused* means an
error before the first step that says what to write instead. All of it runs on CPUs, with torch {torch}.

More about each: [Hugging Face Trainer](huggingface.md), [Accelerate](accelerate.md),
[Lightning](lightning.md), [Fabric](fabric.md), [Megatron-Core](megatron.md), [torchtitan](torchtitan.md),
[streams](streams.md), [plain loops](convert_a_script.md), [scripts for each task](recipes.md). The versions of torch
with which these tests pass are in [torch versions](torch_versions.md).
"""


class Feature(NamedTuple):
    """One line of the table."""

    framework: str
    name: str
    how: str
    test: str
    """The test that shows it: its file, seen from the root, and its name."""


def features(folder: Path = ROOT / "tests") -> list[Feature]:
    """Return the features that the tests below ``folder`` show. Raises ValueError for a marker that is none."""
    return [one for path in sorted(folder.rglob("test_*.py")) for one in _of_file(path)]


def page(found: list[Feature]) -> str:
    """Return the text of the page."""
    versions = _versions()
    parts = [_TEXT.format(torch=versions["torch"])]
    for framework, packages in PACKAGES.items():
        rows = sorted(
            {one for one in found if one.framework == framework}, key=lambda one: (one.how == "refused", one.name)
        )
        if not rows:
            continue
        named = ", ".join(f"{package} {versions[package]}" for package in packages)
        parts.append(f"## {framework}\n\n" + (f"Versions: {named}\n\n" if named else ""))
        parts[-1] += "| feature | | shown by |\n|---|---|---|\n"
        parts[-1] += "".join(f"| {one.name} | {one.how} | `{one.test}` |\n" for one in rows)
    return "\n".join(parts)


def _of_file(path: Path) -> Iterator[Feature]:
    for test in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef) and test.name.startswith("test_")):
            continue
        for call in (call for decorator in test.decorator_list for call in ast.walk(decorator)):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.feature":
                yield _feature(
                    call, f"{path.relative_to(ROOT)}::{test.name}" if path.is_relative_to(ROOT) else test.name
                )


def _feature(call: ast.Call, test: str) -> Feature:
    try:
        framework, name = (ast.literal_eval(one) for one in call.args)
        how = ast.literal_eval(call.keywords[0].value) if call.keywords else HOW[0]
    except ValueError as error:
        raise ValueError(f"{test}: a feature is given as plain texts: {ast.unparse(call)}") from error
    if framework not in PACKAGES or how not in HOW:
        raise ValueError(f"{test}: no framework {framework!r} with {how!r}; see tests/frameworks/table.py")
    return Feature(framework, name, how, test)


def _versions() -> dict[str, str]:
    lines = (ROOT / "requirements-dev.lock").read_text().splitlines()
    locked = dict(re.findall(r"^([A-Za-z0-9_-]+)==(\S+)$", "\n".join(lines), re.MULTILINE))
    every = {package for packages in PACKAGES.values() for package in packages}
    return {**dict.fromkeys(every, "not locked"), **TRIED, **locked}


if __name__ == "__main__":
    PAGE.write_text(page(features()))
