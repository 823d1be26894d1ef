"""The worker process: its connections, its control thread, and its reports to the coordinator."""
