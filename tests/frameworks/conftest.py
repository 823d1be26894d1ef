"""Frameworks are no dependencies of rackrun: where one is missing, its tests are left out."""

from __future__ import annotations

import importlib.util

_NEEDS = {
    "test_hf_*.py": ("transformers",),
    "test_trl_*.py": ("trl", "peft"),
    "test_lightning_*.py": ("lightning",),
    "test_megatron_*.py": ("megatron",),
}
"""Tests -> the packages that they need."""

collect_ignore_glob = [
    files for files, names in _NEEDS.items() if any(importlib.util.find_spec(name) is None for name in names)
]
