"""One step: how long it may take, what it changes, and how that is undone."""
