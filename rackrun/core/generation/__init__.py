"""A generation: its world, what is committed, and where each member's state comes from."""
