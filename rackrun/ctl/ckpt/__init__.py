"""``rackctl ckpt``."""
