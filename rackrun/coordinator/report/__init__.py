"""What a journal tells afterwards."""
