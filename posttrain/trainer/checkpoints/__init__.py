"""Checkpoints that are whole or absent, and what goes to the Hub."""
