"""KV caches of transformers: given to its `generate`, and taken from it."""
