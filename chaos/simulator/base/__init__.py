"""What all models of the simulator share: virtual time, connections, the truth."""
