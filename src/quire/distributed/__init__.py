"""More than one rank: programs that each have a part of the model, and the runner that stands for all of them."""
