"""Reports from a journal."""
