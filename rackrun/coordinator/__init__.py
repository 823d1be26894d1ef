"""The coordinator process: one asyncio loop that receives agents' events, asks the pure core, and carries out its
commands."""
