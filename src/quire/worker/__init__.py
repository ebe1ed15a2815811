"""The worker: applies page operations, runs the model, samples tokens. No queues, no policies."""
