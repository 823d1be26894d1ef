"""Compute what the reports show."""
