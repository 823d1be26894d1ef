"""Carries out the core's commands."""
