"""A worker's place in its generation: process groups, gates, breaks."""
