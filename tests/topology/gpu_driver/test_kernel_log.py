"""The kernel's log is read record by record, and nothing in it can end the reader."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rackrun.topology.gpu_driver.kernel_log import KernelLog, KernelLogUnavailable
from rackrun.topology.gpu_driver.kernel_messages import parse_kernel_line
from rackrun.topology.health.xid import decode_nvlink5, judge_xid

GOLDEN = Path(__file__).parents[1] / "golden"

XID = b"4,1204,98765432,-;NVRM: Xid (PCI:0008:01:00): %d, pid=7\n SUBSYSTEM=pci\n"


@pytest.fixture
def device() -> Iterator[tuple[str, int]]:
    """A pipe of packets, which like /dev/kmsg gives one record for each read: (its path, where to write)."""
    read, write = os.pipe2(os.O_DIRECT | os.O_NONBLOCK)
    yield f"/proc/self/fd/{read}", write
    os.close(read)
    os.close(write)


def test_xids_are_found_among_all_that_the_kernel_says(device: tuple[str, int]) -> None:
    path, write = device
    log = KernelLog.open(path)
    assert isinstance(log, KernelLog)
    assert log.read() == []
    for record in (
        b"6,1,1,-;usb 1-1: new device\n",
        XID % 31,
        b"\xff\xfe no record",
        b"12,2,2,-;NVRM: Xid (PCI:0:1:0): 79, x",
        XID % 79,
    ):
        os.write(write, record)
    assert [(found.xid, found.bdf) for found in log.read()] == [(31, "00000008:01:00.0"), (79, "00000008:01:00.0")]
    assert log.read() == []
    os.write(write, XID % 48)
    assert [found.xid for found in log.read()] == [48]
    log.close()


def test_every_line_of_the_golden_log_becomes_what_the_table_says() -> None:
    rows = (line.split() for line in (GOLDEN / "kernel-log.table").read_text().splitlines()[2:])
    table = {int(number): " ".join(row) for number, *row in rows}
    lines = (GOLDEN / "kernel-log.txt").read_text().splitlines()
    found = {number: said for number, line in enumerate(lines, 1) if (said := meaning(line))}
    assert found == table


def meaning(line: str) -> str:
    """A row of the table; empty for a line that says nothing of a GPU."""
    told = parse_kernel_line(line)
    if told is None:
        return ""
    unit, status = "-", "-"
    if told.nvlink is not None:
        decoded = decode_nvlink5(told.xid, told.nvlink.intr_info, told.nvlink.error_status)
        unit, status = decoded.unit if decoded else "-", f"{told.nvlink.error_status:#x}"
    health = judge_xid(told.xid, nvlink=told.nvlink, announced=told.action).health.name
    action = "-" if told.action is None else told.action
    return f"{told.xid} {told.bdf} {health} {unit} {status} {action}"


def test_what_was_written_before_is_not_told(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(XID % 79)
    log = KernelLog.open(str(path))
    assert isinstance(log, KernelLog)
    assert log.read() == []
    log.close()


def test_a_log_that_may_not_be_read_is_said() -> None:
    answer = KernelLog.open("/nowhere/kmsg")
    assert isinstance(answer, KernelLogUnavailable)
    assert "No such file" in answer.what
    assert answer.remedy
