"""The strangers' campaign: training scripts as people write them, faults at their own lines, and their own word for what came of it."""
