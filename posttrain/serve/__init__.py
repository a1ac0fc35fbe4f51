"""The rollout server: vLLM behind one authenticated ASGI app. Imports nothing else of posttrain, so that it can run in
an environment of its own: `PYTHON path/to/posttrain/serve --model ... --port ...`."""
