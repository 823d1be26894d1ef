"""Arenas: a rank's checkpoint images in memory that outlives its process."""
