"""The journal in SQLite: how it is written, read, folded and checked."""
