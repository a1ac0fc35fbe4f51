"""Chat templates: conversations as token ids with the mask of trained tokens, and back."""
