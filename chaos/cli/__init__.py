"""``rackctl chaos``."""
