"""From a checkpoint to an engine: the checkpoint, its loader, the memory plan, the engine."""
