"""Options of the launcher: parsed, and checked before anything starts."""
