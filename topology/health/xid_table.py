"""NVIDIA's Xid catalogue as data: what the driver's error numbers mean, and the immediate action that NVIDIA names.

Source: Xid-Catalog.xlsx and "Analyzing Xid Errors with the Xid Catalog",
https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html (sheets "Catalog" and "XID 144-150 Decode").
Numbers whose entry is "Unused" are left out.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["CATALOGUE", "NVLINK5", "NVLINK5_UNITS", "CatalogueEntry", "Nvlink5Unit"]


class CatalogueEntry(NamedTuple):
    """One number of the catalogue."""

    mnemonic: str
    action: str
    """The catalogue's immediate action; ``""`` where it names none."""
    announced_since: int | None = None
    """The first driver branch in which Xid 154 and the recovery action follow this error."""


_E = CatalogueEntry

CATALOGUE: dict[int, CatalogueEntry] = {
    8: _E("ROBUST_CHANNEL_FIFO_ERROR_IDLE_TIMEOUT", "RESTART_APP"),
    11: _E("ROBUST_CHANNEL_GR_ERROR_MISSING_HW", "RESTART_APP"),
    13: _E("ROBUST_CHANNEL_GR_EXCEPTION", "RESTART_APP"),
    14: _E("ROBUST_CHANNEL_FAKE_ERROR", "IGNORE"),
    25: _E("ROBUST_CHANNEL_GR_ILLEGAL_NOTIFY", "RESTART_APP"),
    31: _E("ROBUST_CHANNEL_FIFO_ERROR_MMU_ERR_FLT", "RESTART_APP"),
    32: _E("ROBUST_CHANNEL_PBDMA_ERROR", "RESTART_APP"),
    37: _E("ROBUST_CHANNEL_FECS_ERR_UNIMP_FIRMWARE_METHOD", "IGNORE"),
    38: _E("ROBUST_CHANNEL_FECS_ERR_WATCHDOG_TIMEOUT", "IGNORE"),
    **{
        xid: _E(f"ROBUST_CHANNEL_CE{engine}_ERROR", "RESTART_APP")
        for engine, xid in enumerate((39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136)))
    },
    43: _E("ROBUST_CHANNEL_RESETCHANNEL_VERIF_ERROR", "IGNORE"),
    44: _E("ROBUST_CHANNEL_GR_FAULT_DURING_CTXSW", "IGNORE"),
    45: _E("ROBUST_CHANNEL_PREEMPTIVE_REMOVAL", "WORKFLOW_XID_45"),
    46: _E("ROBUST_CHANNEL_GPU_TIMEOUT_ERROR", "RESET_GPU"),
    48: _E("ROBUST_CHANNEL_GPU_ECC_DBE", "WORKFLOW_XID_48", 565),
    54: _E("SILENT_RUNNING_PWR_REDUCED_CLOCKING", "CHECK_MECHANICALS"),
    60: _E("ROBUST_CHANNEL_SEC2_ERROR", "RESTART_APP"),
    61: _E("PMU_BREAKPOINT", "CONTACT_SUPPORT"),
    62: _E("PMU_HALT_ERROR", "RESET_GPU", 565),
    63: _E("INFOROM_DRAM_RETIREMENT_EVENT", "IGNORE", 565),
    64: _E("INFOROM_DRAM_RETIREMENT_FAILURE", "RESET_GPU", 565),
    66: _E("ROBUST_CHANNEL_FECS_ERR_REG_ACCESS_VIOLATION", "IGNORE"),
    67: _E("ROBUST_CHANNEL_FECS_ERR_VERIF_VIOLATION", "IGNORE"),
    69: _E("ROBUST_CHANNEL_GR_CLASS_ERROR", "RESTART_APP"),
    74: _E("NVLINK_ERROR", "WORKFLOW_NVLINK_ERR", 565),
    78: _E("VGPU_START_ERROR", "UPDATE_SWFW"),
    79: _E("ROBUST_CHANNEL_GPU_HAS_FALLEN_OFF_THE_BUS", "RESTART_BM", 565),
    80: _E("PBDMA_PUSHBUFFER_CRC_MISMATCH", "RESTART_APP"),
    **{
        xid: _E(f"ROBUST_CHANNEL_NVJPG{engine}_ERROR", "RESTART_APP")
        for engine, xid in enumerate((82, *range(99, 106)))
    },
    **{
        xid: _E(f"ROBUST_CHANNEL_NVDEC{engine}_ERROR", "RESTART_APP")
        for engine, xid in enumerate((68, 83, 84, 88, 89, 96, 97, 98))
    },
    86: _E("ROBUST_CHANNEL_OFA0_ERROR", "RESTART_APP"),
    92: _E("EXCESSIVE_SBE_INTERRUPTS", "IGNORE"),
    93: _E("INFOROM_ERASE_LIMIT_EXCEEDED", "IGNORE"),
    94: _E("ROBUST_CHANNEL_CONTAINED_ERROR", "RESTART_APP", 565),
    95: _E("ROBUST_CHANNEL_UNCONTAINED_ERROR", "RESET_GPU", 565),
    106: _E("SMBPBI_TEST_MESSAGE", "IGNORE"),
    107: _E("SMBPBI_TEST_MESSAGE_SILENT", "IGNORE"),
    108: _E("NVLINK_REMOTE_TRANSLATION_ERROR", "IGNORE"),
    109: _E("ROBUST_CHANNEL_CTXSW_TIMEOUT_ERROR", "RESET_GPU", 570),
    110: _E("SEC_FAULT_ERROR", "RESET_GPU", 565),
    119: _E("GSP_RPC_TIMEOUT", "RESET_GPU"),
    120: _E("GSP_ERROR", "RESET_GPU", 565),
    121: _E("C2C_ERROR", "IGNORE"),
    122: _E("SPI_PMU_RPC_READ_FAIL", "CONTACT_SUPPORT"),
    123: _E("SPI_PMU_RPC_WRITE_FAIL", "CONTACT_SUPPORT"),
    124: _E("SPI_PMU_RPC_ERASE_FAIL", "CONTACT_SUPPORT"),
    125: _E("INFOROM_FS_ERROR", "CONTACT_SUPPORT"),
    136: _E("ALI_TRAINING_FAIL", "RESET_GPU", 565),
    137: _E("NVLINK_PRIV_ERR", "IGNORE"),
    139: _E("ROBUST_CHANNEL_OFA1_ERROR", "RESTART_APP"),
    140: _E("UNRECOVERABLE_ECC_ERROR_ESCAPE", "RESET_GPU"),
    141: _E("ROBUST_CHANNEL_FAST_PATH_ERROR", "IGNORE"),
    142: _E("ROBUST_CHANNEL_NVENC3_ERROR", "CONTACT_SUPPORT"),
    143: _E("GPU_INIT_ERROR", "RESET_GPU", 575),
    144: _E("NVLINK_SAW_ERROR", "WORKFLOW_NVLINK5_ERR", 565),
    145: _E("NVLINK_RLW_ERROR", "WORKFLOW_NVLINK5_ERR", 565),
    146: _E("NVLINK_TLW_ERROR", "WORKFLOW_NVLINK5_ERR", 565),
    147: _E("NVLINK_TREX_ERROR", "WORKFLOW_NVLINK5_ERR", 565),
    148: _E("NVLINK_NVLPW_CTRL_ERROR", "WORKFLOW_NVLINK5_ERR", 565),
    149: _E("NVLINK_NETIR_ERROR", "WORKFLOW_NVLINK5_ERR", 565),
    150: _E("NVLINK_MSE_ERROR", "WORKFLOW_NVLINK5_ERR", 565),
    151: _E("ROBUST_CHANNEL_KEY_ROTATION_ERROR", "RESTART_VM"),
    152: _E("ROBUST_CHANNEL_DLA_SMMU_ERROR", "IGNORE"),
    153: _E("ROBUST_CHANNEL_DLA_TIMEOUT", "IGNORE"),
    154: _E("GPU_RECOVERY_ACTION_CHANGED", "XID_154"),
    155: _E("NVLINK_SW_DEFINED_ERROR", "RESET_GPU", 565),
    156: _E("RESOURCE_RETIREMENT_EVENT", "RESET_GPU", 565),
    157: _E("RESOURCE_RETIREMENT_FAILURE", "IGNORE"),
    158: _E("GPU_FATAL_TIMEOUT", "RESET_GPU", 565),
    159: _E("ROBUST_CHANNEL_CHI_NON_DATA_ERROR", "CHECK_UVM", 565),
    160: _E("CHANNEL_RETIREMENT_EVENT", "IGNORE", 575),
    161: _E("CHANNEL_RETIREMENT_FAILURE", "IGNORE", 575),
    162: _E("PSHC_REENGAGED", ""),
    163: _E("PSHC_DISENGAGED", ""),
    164: _E("PSHC_LOW_LIFETIME", ""),
    165: _E("PSHC_ZERO_LIFETIME", ""),
    166: _E("NVLINK_SECURE_CRYPTO_ERR", ""),
    167: _E("PCIE_FATAL_TIMEOUT", ""),
    168: _E("REDUCED_GPU_MEMORY_CAPACITY", ""),
    169: _E("SEC2_HALT_ERROR", ""),
    170: _E("NVLINK_SECURE_OTHER", ""),
    171: _E("UNCORRECTABLE_DRAM_ERROR", ""),
    172: _E("UNCORRECTABLE_SRAM_ERROR", ""),
}


class Nvlink5Unit(NamedTuple):
    """The part of an NVLink5 port that reports an error, by its code in ``intrInfo``."""

    xid: int
    unit: str
    old: int
    """``intrInfo`` bits 9 to 5, drivers before R575; bits 4 to 0 are then ``xid - 143``, 0 for Xid 150."""
    new: int
    """``intrInfo`` bits 6 to 0, drivers from R575 on."""


NVLINK5_UNITS: tuple[Nvlink5Unit, ...] = (
    Nvlink5Unit(144, "SAW_MVB", 1, 1),
    Nvlink5Unit(145, "RLW_CTRL", 3, 3),
    Nvlink5Unit(145, "RLW_REMAP", 4, 4),
    Nvlink5Unit(145, "RLW_RSPCOL", 5, 5),
    Nvlink5Unit(145, "RLW_RXPIPE", 6, 6),
    Nvlink5Unit(145, "RLW_SRC_TRACK", 7, 7),
    Nvlink5Unit(145, "RLW_TAGSTATE", 8, 8),
    Nvlink5Unit(146, "TLW_CTRL", 9, 9),
    Nvlink5Unit(146, "TLW_RX", 10, 10),
    Nvlink5Unit(146, "TLW_RX", 10, 11),
    Nvlink5Unit(146, "TLW_TX", 11, 12),
    Nvlink5Unit(146, "TLW_TX", 11, 13),
    Nvlink5Unit(147, "TREX", 12, 14),
    Nvlink5Unit(148, "NVLPW", 0, 15),
    Nvlink5Unit(149, "NETIR_INT", 0, 24),
    Nvlink5Unit(149, "NETIR_LINK_DOWN", 14, 17),
    Nvlink5Unit(149, "NETIR_BER_EVENT", 17, 19),
    Nvlink5Unit(149, "NETIR_MFDE_EVENT", 18, 20),
    Nvlink5Unit(150, "MSE_WATCHDOG", 0, 0),
)

_IGNORE, _RESET, _EVAL = "IGNORE", "RESET_GPU", "XID_154_EVAL"


def _rows(unit: str, action: str, *statuses: int) -> dict[tuple[str, int], str]:
    return {(unit, status): action for status in statuses}


NVLINK5: dict[tuple[str, int], str] = {
    # (unit, errorStatus) -> action. NETIR_LINK_DOWN is decided by its reason instead: see `xid.decode_nvlink5`.
    **_rows("SAW_MVB", _IGNORE, 0x1, 0x4, 0x8, 0x20),
    **_rows("SAW_MVB", _RESET, 0x2, 0x10),
    **_rows("RLW_CTRL", _IGNORE, 0x80000000),
    **_rows("RLW_REMAP", _EVAL, 0x1, 0x2, 0x4, 0x8, 0x10, 0x20),
    **_rows("RLW_REMAP", _RESET, 0x40, 0x80),
    **_rows("RLW_REMAP", _IGNORE, 0x100, 0x200, 0x80000000),
    **_rows("RLW_RSPCOL", _IGNORE, 0x1, 0x80000000),
    **_rows("RLW_RSPCOL", _RESET, 0x2),
    **_rows("RLW_RXPIPE", _IGNORE, 0x1, 0x2, 0x4, 0x8, 0x80000000),
    **_rows("RLW_SRC_TRACK", _RESET, 0x1, 0x10, 0x20),
    **_rows("RLW_SRC_TRACK", _IGNORE, 0x2, 0x80000000),
    **_rows("RLW_SRC_TRACK", _EVAL, 0x4, 0x8),
    **_rows("RLW_TAGSTATE", _IGNORE, 0x1, 0x10000, 0x80000000),
    **_rows("RLW_TAGSTATE", _RESET, 0x2, 0x20000, 0x100000),
    **_rows("TLW_CTRL", _IGNORE, 0x1, 0x2, 0x80000000),
    **_rows("TLW_CTRL", _RESET, 0x4),
    **_rows("TLW_RX", _IGNORE, 0x1, 0x2, 0x80000000),
    **_rows("TLW_RX", _RESET, 0x4),
    **_rows("TLW_TX", _IGNORE, 0x1, 0x2, 0x80000000),
    **_rows("TLW_TX", _RESET, 0x4),
    **_rows("TREX", _IGNORE, 0x1, 0x80000000),
    **_rows("NVLPW", _IGNORE, 0x80000000),
    **_rows("NETIR_INT", _RESET, 0x0),
    **_rows("NETIR_BER_EVENT", _IGNORE, 0x0, 0x1, 0x2, 0x3),
    **_rows("NETIR_MFDE_EVENT", _RESET, 0x1, 0x4, 0x5, 0x7),
    **_rows("NETIR_MFDE_EVENT", _IGNORE, 0x3),
    **_rows("MSE_WATCHDOG", _RESET, 0x0, 0xFFFFFFFF),
}
