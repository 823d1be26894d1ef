"""The adapter of Lightning's ``Trainer`` and ``Fabric``."""
