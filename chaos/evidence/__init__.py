"""Collect what a run has left behind, and describe it."""
