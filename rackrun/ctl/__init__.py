"""``rackctl``: commands to inspect and control a run."""
