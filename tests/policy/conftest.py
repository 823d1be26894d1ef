"""Fixtures of the tests of policies."""

from __future__ import annotations
