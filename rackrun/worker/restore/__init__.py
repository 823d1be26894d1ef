"""Brings state to a rank that takes over, from live ranks or from snapshots."""
