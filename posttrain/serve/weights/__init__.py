"""Parts of a version as they arrive, put together, verified and flipped to."""
