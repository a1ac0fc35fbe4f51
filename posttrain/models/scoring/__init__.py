"""Asking a model about tokens without keeping its logits."""
