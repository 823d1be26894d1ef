"""Racks, trays, GPUs and cliques as values, and the files that describe them."""
