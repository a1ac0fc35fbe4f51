"""What writes completions: the protocol, sampling, and one engine per module or room."""
