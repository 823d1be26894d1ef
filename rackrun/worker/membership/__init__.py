"""A worker's membership in a generation: process groups, gates, and breaks of collectives."""
