"""Slow ranks: how they are found, reported and replaced, and how work is shifted away from them."""
