"""The worker process: the ``elastic`` decorator, the step loop, process groups that can be broken and rebuilt, and the
tracked state."""
