"""Slow ranks: how they are found, reported or swapped, and how work is shifted away from them."""
