"""The job under test, its environment on this machine, and the processes that run beside it."""
