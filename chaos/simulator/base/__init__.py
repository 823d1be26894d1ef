"""What all models of the simulator share: virtual time, connections, durations, and the ground truth."""
