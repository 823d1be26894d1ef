"""The base of all chaos modules: errors, random streams, the job's command and its size."""
