"""What operators ask of a running job, whether it is allowed, and what they are answered."""
