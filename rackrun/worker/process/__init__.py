"""The worker's process: how it came to be, its control thread, its reports."""
