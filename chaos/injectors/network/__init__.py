"""Partitions and bad links."""
