"""A run of the launcher, from its start until the job is over."""
