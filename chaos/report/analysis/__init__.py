"""What the reports are computed from."""
