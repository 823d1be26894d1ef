"""Options of the launcher: parsing, and checks before anything starts."""
