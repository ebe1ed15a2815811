"""The HTTP server: OpenAI's API over AsyncLLM. `serve` in run.py starts it; importing this package loads nothing."""
