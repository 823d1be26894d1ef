"""The worker's side: the decorator, the step loop, groups that can be broken and rebuilt, and the state that is kept."""
