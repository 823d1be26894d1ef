"""``rackctl``: look at a run, and stop it."""
