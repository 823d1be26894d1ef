"""How a job forms, begins, restarts and shuts down."""
