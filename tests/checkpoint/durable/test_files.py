"""What stores ask of files in a directory of this host."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from rackrun.checkpoint.durable.storage.files import Files, put_name


def test_the_directory_of_all_jobs_is_made_with_those_above_it_and_may_be_there(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b"
    for _ in range(2):
        Files().make_root(root)
        assert root.is_dir()


class Refusing(Files):
    """A file system that refuses hard links, as FAT and many network file systems do."""

    def __init__(self, number: int) -> None:
        self.number = number

    def link(self, old: Path, new: Path) -> None:
        raise OSError(self.number, os.strerror(self.number))


NO_LINKS = [errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV]
FILES = ["with links", *(errno.errorcode[number] for number in NO_LINKS)]


@pytest.fixture
def part(tmp_path: Path) -> Path:
    (tmp_path / "part").write_text("new")
    return tmp_path / "part"


@pytest.mark.parametrize("files", [Files(), *map(Refusing, NO_LINKS)], ids=FILES)
def test_a_finished_file_is_given_its_name_with_and_without_hard_links(files: Files, part: Path) -> None:
    name = part.with_name("name")
    assert put_name(files, part, name)
    assert name.read_text() == "new"


@pytest.mark.parametrize("files", [Files(), *map(Refusing, NO_LINKS)], ids=FILES)
def test_a_name_that_is_taken_is_left_as_it_was(files: Files, part: Path) -> None:
    name = part.with_name("name")
    name.write_text("of another")
    assert not put_name(files, part, name)
    assert (part.read_text(), name.read_text()) == ("new", "of another")


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EACCES, errno.EROFS, errno.ESTALE])
def test_a_name_that_storage_refuses_for_another_reason_is_not_given_and_the_reason_is_told(
    number: int, part: Path
) -> None:
    with pytest.raises(OSError, match=re.escape(os.strerror(number))) as raised:
        put_name(Refusing(number), part, part.with_name("name"))
    assert raised.value.errno == number
    assert os.listdir(part.parent) == ["part"]
