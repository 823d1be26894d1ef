"""A tray's GPUs: which slot has which GPU, their health, and checks before the tray joins."""
