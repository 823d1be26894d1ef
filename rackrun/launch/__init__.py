"""Parts of `rackrun.launcher`: options, the run's directory, rendezvous, local agents, the screen, the job's loop."""
