"""The building blocks of models: small torch modules without autograd, independent of models, batches and caches."""
