"""Faults as values: their kinds, targets, and what is wrong with one."""
