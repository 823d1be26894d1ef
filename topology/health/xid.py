"""Classify an Xid: what it says about the health of its GPU.

Up to three sources describe one error. The first that has an answer decides: the recovery action read now, the one that
Xid 154 announced, then the catalogue's entry (`xid_table`).
"""

from __future__ import annotations

from typing import NamedTuple

from rackrun.protocol.gpu_health import SEVERITY, Health, health_of_action
from rackrun.topology.gpu_driver.kernel_messages import NvlinkReport
from rackrun.topology.health.xid_table import CATALOGUE, NVLINK5, NVLINK5_UNITS

__all__ = ["XidClass", "Nvlink5", "decode_nvlink5", "judge_xid"]

FALLEN_OFF_THE_BUS, DOUBLE_BIT_ECC, ACTION_CHANGED = 79, 48, 154
NVLINK5_XIDS = range(144, 151)
NVLINK_XIDS = frozenset({74, 136, 155, *NVLINK5_XIDS})
NEW_INTR_INFO_SINCE = 575
LINK_DOWN_IGNORED = frozenset({38, 40})
"""Reasons of NETIR_LINK_DOWN that need no action. All others, including future ones, need a reset."""

_ACTIONS: dict[str, Health] = {
    "": Health.OK,  # the catalogue names no action: it accompanies another Xid, or the recovery action decides
    "IGNORE": Health.OK,
    "RESTART_APP": Health.APP,
    "RESET_GPU": Health.RESET,
    "RESTART_BM": Health.REBOOT,
    "RESTART_VM": Health.REBOOT,
    "CONTACT_SUPPORT": Health.DEGRADED,
    "CHECK_MECHANICALS": Health.DEGRADED,
    "UPDATE_SWFW": Health.DEGRADED,
    "CHECK_UVM": Health.DEGRADED,  # a reset if managed memory is in use, else nothing; that cannot be seen from here
    "WORKFLOW_XID_45": Health.OK,  # clean-up after another error, or after a process was killed
    "WORKFLOW_XID_48": Health.RESET,
    "WORKFLOW_NVLINK_ERR": Health.RESET,
    "XID_154": Health.OK,
    "XID_154_EVAL": Health.APP,
}


class XidClass(NamedTuple):
    """The health class of an Xid, and why."""

    health: Health
    why: str
    fabric: bool


class Nvlink5(NamedTuple):
    """One decoded report of an NVLink5 port."""

    unit: str
    action: str
    link_down_reason: int | None = None


def judge_xid(
    xid: int,
    *,
    live: int | None = None,
    announced: int | None = None,
    driver: int | None = None,
    nvlink: NvlinkReport | None = None,
    recent: frozenset[int] = frozenset(),
) -> XidClass:
    """Return the health class of a GPU that reported ``xid``, and why.

    ``live``: its recovery action read after the report; None when it could not be read. ``announced``: the last
    recovery action that Xid 154 named. ``driver``: the driver branch, such as 575. ``recent``: other Xids of this GPU
    within the last minute.
    """
    health, why = _by_catalogue(xid, driver, nvlink, recent)
    fabric = xid in NVLINK_XIDS and SEVERITY[health] > SEVERITY[Health.APP]
    for action, source in ((live, "the driver"), (announced, "Xid 154")):
        if action is None:
            continue
        wanted = health_of_action(action)
        if wanted is not Health.OK:
            return XidClass(wanted, f"{why}; recovery action {action}, by {source}", fabric or wanted is Health.FABRIC)
        if _announces(xid, driver) and SEVERITY[health] > SEVERITY[Health.APP]:
            undecoded = xid in NVLINK5_XIDS and nvlink is None  # most undecoded reports matter to no one
            calm = Health.OK if undecoded else Health.APP
            return XidClass(calm, f"{why}; {source} asks for no recovery", fabric=False)
        break  # the source asks for nothing, but with this Xid that means nothing
    return XidClass(health, why, fabric)


def decode_nvlink5(xid: int, intr_info: int, error_status: int, driver: int | None = None) -> Nvlink5 | None:
    """Decode the report of an NVLink5 port. Return None when the table does not have it.

    Without ``driver`` both layouts of ``intr_info`` are tried: within one Xid, no word is valid in both.
    """
    old, new = driver is None or driver < NEW_INTR_INFO_SINCE, driver is None or driver >= NEW_INTR_INFO_SINCE
    marker = 0 if xid == 150 else xid - 143
    for entry in NVLINK5_UNITS:
        is_old = old and intr_info & 0x3FF == entry.old << 5 | marker
        is_new = new and intr_info & 0x7F == entry.new
        if entry.xid != xid or not (is_old or is_new):
            continue
        if entry.unit == "NETIR_LINK_DOWN":
            reason = (intr_info >> 20) & 0x3F
            return Nvlink5(entry.unit, "IGNORE" if reason in LINK_DOWN_IGNORED else "RESET_GPU", reason)
        action = NVLINK5.get((entry.unit, error_status))
        return Nvlink5(entry.unit, action) if action else None
    return None


def _announces(xid: int, driver: int | None) -> bool:
    """Whether this driver sets the recovery action with this Xid.

    A GPU that has fallen off the bus gives no new answer.
    """
    entry = CATALOGUE.get(xid)
    since = entry.announced_since if entry else None
    return xid != FALLEN_OFF_THE_BUS and since is not None and driver is not None and driver >= since


def _by_catalogue(
    xid: int, driver: int | None, nvlink: NvlinkReport | None, recent: frozenset[int]
) -> tuple[Health, str]:
    entry = CATALOGUE.get(xid)
    if entry is None:
        return Health.UNKNOWN, f"Xid {xid}, which is in no catalogue"
    name = f"Xid {xid} {entry.mnemonic}"
    if xid in NVLINK5_XIDS:
        return _by_port(xid, name, driver, nvlink)
    if xid == FALLEN_OFF_THE_BUS:
        return Health.LOST, name
    if xid == DOUBLE_BIT_ECC and recent & {63, 64}:
        return Health.DEGRADED, f"{name}, with a row remapped: drain, then reset"
    return _ACTIONS[entry.action], f"{name}: {entry.action or 'no action named'}"


def _by_port(xid: int, name: str, driver: int | None, nvlink: NvlinkReport | None) -> tuple[Health, str]:
    if nvlink is None:
        return Health.DEGRADED, f"{name}, without its details"
    where = f"{name} on link {nvlink.link}" if nvlink.link >= 0 else name
    found = decode_nvlink5(xid, nvlink.intr_info, nvlink.error_status, driver)
    if found is None:  # the driver's own severity decides
        said = "Fatal" if nvlink.fatal else "Nonfatal"
        return (Health.RESET if nvlink.fatal else Health.OK), f"{where}, {nvlink.unit} {said}: not in the table"
    reason = "" if found.link_down_reason is None else f", reason {found.link_down_reason}"
    return _ACTIONS[found.action], f"{where}, {found.unit}{reason}: {found.action}"
