"""The commands of ``rackctl chaos``."""
