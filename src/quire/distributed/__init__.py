"""Multiple ranks: processes that each hold a part of the model, and the runner that stands for all of them."""
