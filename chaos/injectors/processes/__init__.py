"""Injectors for processes: signals, slowness, returns and duplicates."""
