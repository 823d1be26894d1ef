"""Trays, slots and workers of a rack: which are fit, which are spare, which are quarantined."""
