"""Scripts as users write them have no errors for a type checker: small ones of ours, strictly; those of the documents and the examples, as they are."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.typing.document_scripts import blocks, whole

pytestmark = pytest.mark.types

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "tests" / "typing" / "scripts").glob("*.py"))
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [block for page in PAGES for block in blocks(page)]

STRICT = (
    "check_untyped_defs",
    "disallow_any_generics",
    "disallow_incomplete_defs",
    "disallow_subclassing_any",
    "disallow_untyped_calls",
    "disallow_untyped_decorators",
    "disallow_untyped_defs",
    "extra_checks",
    "no_implicit_reexport",
    "strict_equality",
    "warn_return_any",
    "warn_unused_ignores",
)
"""What ``--strict`` says of a single module."""
NOT_LOOKED_INTO = ["_decomp", "_dynamo", "_export", "_functorch", "_higher_order_ops", "_inductor", "_prims", "_refs"]
NOT_LOOKED_INTO += ["_subclasses", "ao", "export", "fx.experimental", "onnx", "testing"]
"""Parts of torch that no type of a script's comes from: half of mypy's time."""
CONFIG = f"""
[mypy]
python_version = 3.11
explicit_package_bases = True
warn_redundant_casts = True
untyped_calls_exclude = torch

[mypy-tests.typing.scripts.*]
{chr(10).join(f"{flag} = True" for flag in STRICT)}

[mypy-documents.*]
disable_error_code = empty-body

[mypy-rackrun.*,benchmarks.*]
ignore_errors = True

[mypy-torch.*]
implicit_reexport = True

[mypy-{",".join(f"torch.{name}.*" for name in NOT_LOOKED_INTO)},sympy.*]
follow_imports = skip

[mypy-safetensors.*,accelerate.*]
ignore_missing_imports = True
"""
"""What is in rackrun is checked by itself, and where it is installed nobody checks it again. A body of three dots, as in documents, is no mistake."""


@dataclass
class Checked:
    """What a checker says of each file: lines, by the file's path."""

    files: set[Path]
    errors: dict[Path, list[str]] = field(default_factory=dict)
    elsewhere: str = ""
    """What it says of none of them."""

    def of(self, path: Path) -> list[str]:
        assert path in self.files, f"{path} was not looked at"
        assert not self.elsewhere
        return self.errors.get(path, [])


def document(folder: Path, number: int) -> Path:
    """The file of that block."""
    block = BLOCKS[number]
    return folder / f"{block.page.stem.lower()}_line_{block.line}.py"


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a script for each block of the documents."""
    folder = tmp_path_factory.mktemp("scripts") / "documents"
    folder.mkdir()
    for number, block in enumerate(BLOCKS):
        document(folder, number).write_text(whole(block) or "", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def mypy(documents: Path, tmp_path_factory: pytest.TempPathFactory) -> Checked:
    """One process for all files: most of its time goes into torch's and rackrun's own types."""
    folder = tmp_path_factory.mktemp("mypy")
    config = folder / "mypy.ini"
    config.write_text(CONFIG, encoding="utf-8")
    files = [*SCRIPTS, *EXAMPLES, *sorted(documents.glob("*.py"))]
    options = [
        "--config-file",
        str(config),
        "--cache-dir",
        str(folder / "cache"),
        "--no-error-summary",
        "--show-absolute-path",
    ]
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples"), str(documents.parent)])
    ended = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *files],
        capture_output=True,
        text=True,
        env=os.environ | {"MYPYPATH": path},
        cwd=folder,
    )
    checked = Checked(set(files))
    for line in ended.stdout.splitlines():
        found = re.match(r"(.+?\.py):\d+: (error|note): ", line)
        if found and Path(found[1]) in checked.files:
            checked.errors.setdefault(Path(found[1]), []).append(line)
        else:
            checked.elsewhere += line + "\n"
    checked.elsewhere += ended.stderr
    assert ended.returncode in (0, 1), checked.elsewhere
    return checked


@pytest.fixture(scope="module")
def pyright(documents: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, list[str]]:
    """What it says of each file: lines."""
    # what torch leaves open is no mistake of a script's
    of_torch = (
        "MissingTypeStubs",
        "PrivateImportUsage",
        "UnknownArgumentType",
        "UnknownMemberType",
        "UnknownVariableType",
    )
    errors: dict[Path, list[str]] = {}
    for mode, files in (("strict", SCRIPTS), ("standard", [*EXAMPLES, *documents.glob("*.py")])):
        settings = {
            "include": [str(file) for file in files],
            "extraPaths": [str(ROOT), str(ROOT / "examples")],
            "pythonVersion": "3.11",
            "typeCheckingMode": mode,
            **{f"report{name}": "none" for name in of_torch},
        }
        config = tmp_path_factory.mktemp("pyright") / "pyrightconfig.json"
        config.write_text(json.dumps(settings), encoding="utf-8")
        ended = subprocess.run(
            [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, "--project", config],
            capture_output=True,
            text=True,
        )
        assert ended.returncode in (0, 1), ended.stdout + ended.stderr
        told = json.loads(ended.stdout)
        assert told["summary"]["filesAnalyzed"] == len(files)
        for found in told["generalDiagnostics"]:
            if found["severity"] == "error":
                line = f"{found['range']['start']['line'] + 1}: {found['message']}"
                errors.setdefault(Path(found["file"]), []).append(line)
    return errors


@pytest.mark.parametrize("number", range(len(BLOCKS)), ids=[f"{b.page.name}:{b.line}" for b in BLOCKS])
def test_every_block_of_the_documents_is_made_whole(number: int) -> None:
    assert whole(BLOCKS[number]) is not None, "name it in _BEFORE, with what it leaves out"


@pytest.mark.parametrize("script", SCRIPTS, ids=[path.name for path in SCRIPTS])
def test_a_user_s_script_has_the_types_that_it_asserts_with_mypy_strict(mypy: Checked, script: Path) -> None:
    assert mypy.of(script) == []


@pytest.mark.parametrize("number", range(len(BLOCKS)), ids=[f"{b.page.name}:{b.line}" for b in BLOCKS])
def test_a_script_of_the_documents_has_no_mypy_errors(mypy: Checked, documents: Path, number: int) -> None:
    assert mypy.of(document(documents, number)) == []


@pytest.mark.parametrize("example", EXAMPLES, ids=[str(path.relative_to(ROOT)) for path in EXAMPLES])
def test_an_example_has_no_mypy_errors(mypy: Checked, example: Path) -> None:
    assert mypy.of(example) == []


def test_no_script_has_pyright_errors(pyright: dict[Path, list[str]]) -> None:
    assert pyright == {}
