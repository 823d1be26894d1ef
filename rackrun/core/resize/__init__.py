"""A smaller or a larger world, racks of a provider, and spares for free slots."""
