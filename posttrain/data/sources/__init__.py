"""Datasets by name: hub ids, files, folders, mixtures."""
