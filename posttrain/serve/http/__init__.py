"""The routes, the gate before them, and the bounds of connections."""
