"""What of Lightning's loops is kept with each step, and the files that their state decides about."""
