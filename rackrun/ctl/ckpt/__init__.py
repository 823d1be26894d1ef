"""``rackctl ckpt``: commands for checkpoint directories."""
