"""When a checkpoint is taken, whole, and given up, and which one a restore takes."""
