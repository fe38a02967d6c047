"""Retrieval: attention of generated tokens to a few chosen tokens of a KV cache that keeps all tokens."""
