"""The HTTP server: OpenAI's API for an AsyncLLM. `serve` in api_server.py starts it. Importing this package loads
nothing."""
