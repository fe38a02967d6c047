"""A transformers model with our attention in it: loading, limits, one forward pass."""
