"""Frameworks are no dependencies of rackrun: where one is missing, its tests are left out."""

from __future__ import annotations

import importlib.util

_FILES = {"transformers": "test_hf_*.py", "lightning": "test_lightning_*.py"}
"""Package -> the tests that need it."""

collect_ignore_glob = [files for package, files in _FILES.items() if not importlib.util.find_spec(package)]
