"""Snapshots of a tray's ranks: copies and parity for other trays."""
