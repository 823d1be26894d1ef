"""The shell around the pure core: one asyncio loop that listens to agents, asks the core, and does what it says."""
