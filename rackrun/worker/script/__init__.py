"""What the user's script does that could not be repeated, and how it is told so."""
