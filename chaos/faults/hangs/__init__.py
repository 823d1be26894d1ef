"""Faults that let processes stand still, or be late or slow."""
