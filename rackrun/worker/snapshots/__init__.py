"""Copies of the state that outlive the process, in memory and on disk."""
