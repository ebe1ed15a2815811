"""The building blocks of models: small torch modules without autograd. They know no model, no batch, no cache."""
