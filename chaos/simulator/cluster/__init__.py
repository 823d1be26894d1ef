"""Models of a job's parts: agents, workers, the coordinator, storage, operators, providers."""
