"""What a run has left, and what it says."""
