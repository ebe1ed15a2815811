"""A client that puts load on an OpenAI-compatible server and times its answers: one asyncio program, `python -m
quire.client`, of which `quire bench serve` starts as many as the load needs.

It loads the standard library alone, and knows neither an engine nor a workload: its requests are bytes of a file.
"""
