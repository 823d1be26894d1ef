"""Frameworks are no dependencies of rackrun: where one is missing, its tests are left out."""

from __future__ import annotations

import importlib.util
import warnings

_NEEDS = {
    "test_hf_*.py": ("transformers",),
    "test_trl_*.py": ("trl", "peft"),
    "test_lightning_*.py": ("lightning",),
    "test_megatron_*.py": ("megatron",),
    "test_titan_*.py": ("torchtitan",),
}
"""Tests -> the packages that they need."""

collect_ignore_glob = [
    files for files, names in _NEEDS.items() if any(importlib.util.find_spec(name) is None for name in names)
]

if importlib.util.find_spec("torchtitan") is not None:
    with warnings.catch_warnings():  # torch's own, which torchtitan brings in
        warnings.simplefilter("ignore", DeprecationWarning)
        import torch.utils.mkldnn  # noqa: F401
