"""The data plane: replays the journal, runs the model, draws tokens. Tensors only; no queues, no policies."""
