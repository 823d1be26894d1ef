"""The job under test, and what runs beside it."""
