"""Start of a worker, from the fork server to the first line of the script."""
