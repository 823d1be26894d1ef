"""What all rooms of checkpoint build on: errors, checksums, locations and process identities."""
