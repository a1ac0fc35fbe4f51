"""The engine, the one thread that uses it, and which version it serves."""
