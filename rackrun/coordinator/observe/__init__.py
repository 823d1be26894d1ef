"""Measurements that do not affect the core: recoveries, progress, speed, metrics."""
