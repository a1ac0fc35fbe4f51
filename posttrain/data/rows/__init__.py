"""Rows: which format they have, what is wrong with them, and how they become Samples."""
