"""Prepared datasets: encoded once, kept on disk, read as views."""
