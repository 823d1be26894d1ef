"""What an injection is."""
