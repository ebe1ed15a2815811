"""What the planes say to each other: what a model keeps, the messages of a step, what a request may ask for."""
