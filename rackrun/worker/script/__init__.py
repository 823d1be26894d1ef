"""Checks the user's script for what could not be repeated after a failure, and says so."""
