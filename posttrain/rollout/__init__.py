"""Where completions come from: engines that write them, and what runs around an engine."""
