"""The optimizer step: optimizers, masters, averages, metrics, skipped steps."""
