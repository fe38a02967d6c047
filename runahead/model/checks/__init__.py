"""Comparisons of a model with what transformers makes of it, and of a model in parts with the whole."""
