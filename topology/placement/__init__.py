"""Decide which rank runs on which slot, and the environment of its process."""
