"""Templates escape every value, miss none, and are written whole."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from rackrun.pages.templates import render, write


def template(folder: Path, text: str) -> Path:
    path = folder / "some.html.j2"
    path.write_text(text)
    return path


def page(content: str) -> str:
    return (
        '{% extends "page.html.j2" %}{% from "parts.html.j2" import banner, list, table %}'
        '{% from "plots.html.j2" import figure, squares %}'
        "{% block title %}{{ text }}{% endblock %}{% block content %}" + content + "{% endblock %}"
    )


def test_every_value_is_escaped_in_text_and_in_attributes(tmp_path: Path) -> None:
    evil = "</title><script>1</script>\"'&<b>"
    parts = (
        "{{ banner(true, text, text, text) }}{{ list([text]) }}{{ table([text], [[text]], [0]) }}"
        "{% call figure(text, text, text, text) %}{% call(one) squares([{'holds': none}]) %}{{ text }}{% endcall %}{% endcall %}"
    )
    root = ET.fromstring(render(template(tmp_path, page(parts)), text=evil))
    assert "script" not in {one.tag for one in root.iter()}
    assert "b" not in {one.tag for one in root.iter()}
    texts = [one.text for one in root.iter() if one.text and evil in one.text]
    assert len(texts) == 9  # the title; three of the banner; an item; two of the table; two of the figure's own
    assert [one.attrib["title"] for one in root.iter("i") if "title" in one.attrib] == [evil]


def test_a_value_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UndefinedError, match="'wanted' is undefined"):
        render(template(tmp_path, "{{ wanted }}"))
    with pytest.raises(UndefinedError, match="'wanted'"):
        render(template(tmp_path, "{% if of.wanted %}{% endif %}"), of={})


def test_a_page_that_cannot_be_rendered_leaves_the_old_one(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    write(out, template(tmp_path, "one"))
    with pytest.raises(UndefinedError):
        write(out, Path(template(tmp_path, "{{ wanted }}")).rename(tmp_path / "other.html.j2"))
    assert out.read_text() == "one"
    assert {path.name for path in tmp_path.iterdir()} == {"page.html", "other.html.j2"}


def test_bytes_of_a_name_that_are_not_utf_8_are_written_as_escapes(tmp_path: Path) -> None:
    name = os.fsdecode(b"run-\xff")
    write(tmp_path / "page.html", template(tmp_path, "{{ name }}"), name=name)
    assert (tmp_path / "page.html").read_bytes() == b"run-\\udcff"


def test_a_figure_without_content_says_why(tmp_path: Path) -> None:
    empty = '{% call figure("x", "X", "What it is. ", "nothing was there.") %} {% if false %}x{% endif %} {% endcall %}'
    (figure,) = ET.fromstring(render(template(tmp_path, page(empty)), text="")).iter("figure")
    assert figure.attrib["data-drawn"] == "nothing"
    assert "".join(figure.itertext()).strip() == "What it is. nothing was there."
