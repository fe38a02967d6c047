"""A pipeline of layers: each stage has some of a model's layers, and chunks of the prompt go from one to the next."""
