"""A file is parsed once for all that ask for its syntax tree."""

from __future__ import annotations

import ast
import linecache
from pathlib import Path

import pytest

from rackrun.worker.script.syntax_tree import syntax_tree


def test_a_file_is_parsed_once(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("loss = 1\n")
    tree = syntax_tree(str(script))
    assert tree is not None
    assert isinstance(tree.body[0], ast.Assign)
    assert syntax_tree(str(script)) is tree


def test_other_source_is_another_tree(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("loss = 1\n")
    before = syntax_tree(str(script))
    script.write_text("for step in range(3):\n    pass\n")
    linecache.checkcache(str(script))
    after = syntax_tree(str(script))
    assert before is not None
    assert after is not None
    assert isinstance(after.body[0], ast.For)


@pytest.mark.parametrize("source", ["for", "\0"])
def test_source_with_an_error_has_no_tree(source: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    assert syntax_tree(str(script)) is None


def test_a_file_that_is_not_there_has_nothing_in_it(tmp_path: Path) -> None:
    tree = syntax_tree(str(tmp_path / "gone.py"))
    assert tree is not None
    assert tree.body == []
