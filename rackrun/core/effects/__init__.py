"""What an event leads to: the commands that are to be carried out."""
