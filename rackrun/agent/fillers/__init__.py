"""Fillers: other work that runs beside waiting spares, and how it is stopped."""
