"""Where `--log-to` writes what `run.log` gets: a module for each kind, and a process for each sink that is in use."""
