"""From the fork server to the script's first line."""
