"""Connect clients, which know texts and HTTP, to the one engine, which knows tokens: messages in both directions."""
