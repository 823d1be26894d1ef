"""Drawn jobs, over many seeds."""
