"""What `rackrun.launcher` is made of: arguments, the place of a run, the port, local agents, the screen, the job's loop."""
