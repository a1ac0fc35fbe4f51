"""Images: opened under limits, decoded to RGB in one place, converted. Not imported before a dataset has images."""
