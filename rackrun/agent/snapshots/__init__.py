"""Snapshots that a tray keeps and serves: of its own ranks, and copies and parity for other trays."""
