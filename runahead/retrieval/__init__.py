"""Attention to a few chosen tokens of a KV cache that keeps all of them."""
