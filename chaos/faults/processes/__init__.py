"""Faults that end processes, start them, or make them leave."""
