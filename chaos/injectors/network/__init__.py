"""Injectors of network partitions and bad links."""
