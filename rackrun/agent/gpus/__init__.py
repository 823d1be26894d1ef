"""A tray's GPUs: which slot has which, their health, checks before a start."""
