"""A load generator for OpenAI-compatible servers: it sends requests and records the times of the answers. It is one
asyncio program, `python -m quire.client`, of which `quire bench serve` starts as many as the load needs.

It imports only the standard library, and neither the engine nor the workload: its requests are bytes of a file."""
