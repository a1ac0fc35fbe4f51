"""Attention over ragged rows and shared prefixes."""
