"""Running reward functions: processes, threads, retries, limits."""
