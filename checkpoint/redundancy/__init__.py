"""Copies and parity of shards: which rank keeps what for which other rank, and the arithmetic of parity."""
