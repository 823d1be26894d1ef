"""The whole core behind one door: events in, commands out."""
