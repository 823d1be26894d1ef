"""One step or phase: how long it may take, which state it changes, and how those changes are undone."""
