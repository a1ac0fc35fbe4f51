"""The arithmetic of a run before it starts: steps, memory, work."""
