"""Frameworks are no dependencies of rackrun: where one is missing, its tests are left out."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("transformers") else ["test_hf_*.py"]
