"""Signals, slowness, returns and duplicates."""
