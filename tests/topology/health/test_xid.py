"""Xids: what the driver says now outranks what it announced, which outranks the catalogue."""

from __future__ import annotations

import pytest

from rackrun.protocol.gpu_health import Health
from rackrun.topology.gpu_driver.kernel_messages import NvlinkReport, parse_kernel_line, parse_kmsg_record
from rackrun.topology.health.xid import _ACTIONS, decode_nvlink5, judge_xid
from rackrun.topology.health.xid_table import CATALOGUE, NVLINK5, NVLINK5_UNITS


def port(xid: int, info: int, status: int, *, fatal: bool = True) -> NvlinkReport:
    return NvlinkReport(unit="?", fatal=fatal, link=8, intr_info=info, error_status=status)


@pytest.mark.parametrize(
    ("xid", "health"),
    [
        (13, Health.APP), (31, Health.APP), (94, Health.APP),
        (43, Health.OK), (45, Health.OK), (63, Health.OK), (92, Health.OK), (162, Health.OK),
        (48, Health.RESET), (64, Health.RESET), (74, Health.RESET), (95, Health.RESET), (119, Health.RESET),
        (79, Health.LOST), (151, Health.REBOOT), (54, Health.DEGRADED), (122, Health.DEGRADED), (9999, Health.UNKNOWN),
    ],
)  # fmt: skip
def test_the_catalogue_decides_when_nobody_else_speaks(xid: int, health: Health) -> None:
    assert judge_xid(xid).health is health


def test_every_action_of_the_tables_has_a_class() -> None:
    assert {entry.action for entry in CATALOGUE.values()} - {"WORKFLOW_NVLINK5_ERR"} <= _ACTIONS.keys()
    assert set(NVLINK5.values()) <= _ACTIONS.keys()


@pytest.mark.parametrize(
    ("action", "health"),
    [
        (1, Health.RESET), (2, Health.REBOOT), (3, Health.DRAIN_P2P), (4, Health.DEGRADED), (5, Health.FABRIC),
        (6, Health.UNKNOWN), (7, Health.UNKNOWN), (250, Health.UNKNOWN),
    ],
)  # fmt: skip
def test_the_live_recovery_action_outranks_xid_154_which_outranks_the_catalogue(action: int, health: Health) -> None:
    assert judge_xid(95, live=action, announced=2).health is health
    assert judge_xid(95, announced=action).health is health
    assert judge_xid(13, live=action).health is health


def test_a_driver_that_announces_and_asks_for_nothing_needs_the_process_restarted_only() -> None:
    assert judge_xid(95, live=0, driver=580).health is Health.APP
    assert judge_xid(95, live=0, driver=550).health is Health.RESET, "this driver sets no action with Xid 95"
    assert judge_xid(95, live=0).health is Health.RESET, "nobody knows which driver it is"
    assert judge_xid(119, live=0, driver=580).health is Health.RESET, "no driver sets an action with Xid 119"
    assert judge_xid(79, live=0, driver=580).health is Health.LOST, "what fell off the bus says nothing new"
    assert judge_xid(63, live=0, driver=580).health is Health.OK


def test_a_double_bit_error_with_a_row_remapped_leaves_time_to_drain() -> None:
    assert judge_xid(48, recent=frozenset({63})).health is Health.DEGRADED
    assert judge_xid(48, recent=frozenset({45})).health is Health.RESET


@pytest.mark.parametrize("xid", range(144, 151))
def test_an_nvlink5_error_without_details_is_not_trusted_until_the_driver_says_so(xid: int) -> None:
    assert judge_xid(xid).health is Health.DEGRADED
    assert judge_xid(xid).fabric
    assert judge_xid(xid, live=0, driver=575) == (Health.OK, judge_xid(xid, live=0, driver=575).why, False)
    assert judge_xid(xid, live=1, driver=575).health is Health.RESET


def words(xid: int) -> list[tuple[str, int, int]]:
    """(unit, its word in drivers before R575, its word since)."""
    marker = 0 if xid == 150 else xid - 143
    return [(one.unit, one.old << 5 | marker, one.new) for one in NVLINK5_UNITS if one.xid == xid]


@pytest.mark.parametrize("xid", range(144, 151))
def test_both_layouts_of_a_port_error_are_read_and_never_mistaken_for_each_other(xid: int) -> None:
    for unit, old, new in words(xid):
        status = next(status for name, status in [*NVLINK5, (unit, 0)] if name == unit)
        for noise in (0, 0x400, 0x3FF << 10):
            known = decode_nvlink5(xid, old | noise, status)
            assert known is not None
            assert known.unit == unit
            assert decode_nvlink5(xid, old | noise, status, driver=570) == known
        assert decode_nvlink5(xid, new, status) == decode_nvlink5(xid, new, status, driver=575) is not None
    others = {new & 0x7F for _, _, new in words(xid)}
    if xid != 150:
        assert not others & {old & 0x7F for _, old, _ in words(xid)}, "a word may mean two units"


@pytest.mark.parametrize(
    ("xid", "info", "status", "health"),
    [
        (144, 0x1, 0x1, Health.OK), (144, 0x1, 0x2, Health.RESET), (144, 0x21, 0x10, Health.RESET),
        (145, 0x4, 0x1, Health.APP), (145, 0x4, 0x40, Health.RESET), (145, 0x82, 0x40, Health.RESET),
        (146, 0xC, 0x4, Health.RESET), (147, 0xE, 0x1, Health.OK), (148, 0xF, 0x80000000, Health.OK),
        (149, 0x13, 0x2, Health.OK), (149, 0x14, 0x1, Health.RESET), (149, 0x18, 0x0, Health.RESET),
        (149, 0x004505C6, 0x0, Health.RESET), (149, 0x02600011, 0x0, Health.OK), (149, 0x02800011, 0x0, Health.OK),
        (149, 0x02A00011, 0x0, Health.RESET), (150, 0x0, 0x0, Health.RESET),
    ],
)  # fmt: skip
def test_a_port_error_is_judged_by_its_unit_and_status(xid: int, info: int, status: int, health: Health) -> None:
    judged = judge_xid(xid, nvlink=port(xid, info, status))
    assert judged.health is health
    assert judged.fabric == (health is Health.RESET)


def test_a_port_error_of_no_link_in_particular_names_none() -> None:
    judged = judge_xid(149, nvlink=NvlinkReport(unit="NETIR", fatal=True, link=-1, intr_info=0x6, error_status=0))
    assert judged == (Health.RESET, "Xid 149 NVLINK_NETIR_ERROR, NETIR_INT: RESET_GPU", True)


def test_a_port_error_that_no_table_has_is_judged_by_the_drivers_own_word() -> None:
    assert judge_xid(144, nvlink=port(144, 0x1, 0x12345)).health is Health.RESET
    assert judge_xid(144, nvlink=port(144, 0x1, 0x12345, fatal=False)).health is Health.OK


# -- the kernel's log
def test_a_kernel_line_names_its_gpu_as_nvml_does() -> None:
    found = parse_kernel_line(
        "[ 1234.5] NVRM: Xid (PCI:0008:9b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
    )
    assert found is not None
    assert (found.xid, found.bdf, found.nvlink, found.action) == (79, "00000008:9b:00.0", None, None)


def test_a_fatal_port_error_is_read_with_its_words() -> None:
    found = parse_kernel_line(
        "NVRM: Xid (PCI:0000:04:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x00000000 0x00000000 0x0 0x0 0x0 0x0)"
    )
    assert found is not None
    assert found.nvlink == NvlinkReport(unit="NETIR_LINK_EVT", fatal=True, link=8, intr_info=0x4505C6, error_status=0)
    calm = parse_kernel_line(
        "NVRM: Xid (PCI:0000:04:00): 146, TLW_RX/TLW_RX_PIPE0 Nonfatal XC0 i0 Link 00 (0x0000000a 0x1 0x0)"
    )
    assert calm is not None
    assert calm.nvlink is not None
    assert not calm.nvlink.fatal


@pytest.mark.parametrize(
    ("said", "action"),
    [
        ("0x0 (None) to 0x2 (Node Reboot Required)", 2), ("0x1 (GPU Reset Required) to 0x0 (None)", 0),
        ("0x0 (None) to 0x4 (Drain and Reset)", 4), ("0x0 (None) to 0x3 (Drain P2P)", 3), ("0x0 to 0x5", 5),
        ("0x0 (None) to 0x5 (Something New)", 5), ("0x0 to 07", 7),
    ],
)  # fmt: skip
def test_xid_154_names_the_new_recovery_action(said: str, action: int) -> None:
    found = parse_kernel_line(f"NVRM: Xid (PCI:0000:9b:00): 154, GPU recovery action changed from {said}")
    assert found is not None
    assert found.action == action


@pytest.mark.parametrize(
    ("line", "xid"),
    [
        ("NVRM: Xid (0000:03:00): 14, Channel 00000001", 14),
        ("NVRM: Xid (PCI:0003:00:00): 74, pid=7, NVLink: fatal error detected on link 14(0x0, 0x0)", 74),
        ("NVRM: Xid (PCI:0000:05:00.0): 31, pid=12, name=python: a colon", 31),
        ("NVRM: Xid (PCI:0000:05:00 GPU-I:01): 43, pid=12", 43),
        ("NVRM: GPU 0000:9b:00.0: GPU has fallen off the bus.", 79),
        ("NVRM: The NVIDIA GPU 0000:9b:00.0 (PCI ID: 10de:2330) has fallen off the bus and is not responding", 79),
        ("NVRM: Xid (PCI:zz): 79, no address", None),
        ("NVRM: Xid (PCI:0000:05:00): seventy", None),
        ("nvidia-nvlink: Nvlink Core is being initialized", None),
        ("", None),
    ],
)
def test_other_lines_are_passed_over(line: str, xid: int | None) -> None:
    found = parse_kernel_line(line)
    assert (found.xid if found else None) == xid


def test_a_record_that_no_kernel_wrote_is_passed_over() -> None:
    line = "NVRM: Xid (PCI:0000:9b:00): 79, GPU has fallen off the bus."
    found = parse_kmsg_record(f"3,1204,98765432,-;{line}\n SUBSYSTEM=pci\n")
    assert found is not None
    assert found.xid == 79
    assert parse_kmsg_record(f"12,1204,98765432,-;{line}") is None, "its facility is that of a process"
    assert parse_kmsg_record(line) is None
