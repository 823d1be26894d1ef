"""Faults of the network between trays and the coordinator."""
