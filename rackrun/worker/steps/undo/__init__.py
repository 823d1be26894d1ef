"""Puts back what a unit has changed that does not count."""
