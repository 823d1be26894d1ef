"""Plan a job's fleet by simulating months of it with the core's own policy and placement.

The planner answers how many spares to keep and where, which policy to use, and how often to save a checkpoint.
"""
