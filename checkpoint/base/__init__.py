"""What all of checkpoint builds on: errors, checksums, identities of processes."""
