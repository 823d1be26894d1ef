"""Frameworks are no dependencies of rackrun: where one is missing, its tests are left out."""

from __future__ import annotations

import importlib.util

_TESTS = {"transformers": "test_hf_*.py", "megatron": "test_megatron_*.py"}
collect_ignore_glob = [tests for package, tests in _TESTS.items() if importlib.util.find_spec(package) is None]
