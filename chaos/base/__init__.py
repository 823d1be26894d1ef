"""What all of chaos builds on: errors, random streams, the job's command."""
