"""The link between fronts, which know texts and clients, and the one engine, which knows tokens: messages both ways."""
