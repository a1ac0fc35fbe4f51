"""vLLM as a rollout engine: in the trainer's process (`colocate`), or as servers (`server_engine`)."""
