"""What fits on a device, and what moves off it."""
