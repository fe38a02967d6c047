"""Every causal family of transformers: whether the runtime computes it, and small models of it."""
