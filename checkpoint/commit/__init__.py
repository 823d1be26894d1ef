"""When a checkpoint commits, when an older one may be removed, and which one a restore takes."""
