"""Sparse prefill beside the exact one: TTFT in a chain, density, and what it loses."""
