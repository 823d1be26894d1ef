"""The whole core behind one entry point: events in, commands out."""
