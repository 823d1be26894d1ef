"""What is measured beside the core: recoveries, progress, speed, metrics."""
