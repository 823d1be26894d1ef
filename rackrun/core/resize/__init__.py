"""Shrinking and growing the world, racks from a provider, and spares for free slots."""
