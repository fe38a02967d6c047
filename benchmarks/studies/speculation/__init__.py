"""Speculative decoding: its gain on texts that repeat and texts that do not, and its tokens beside those without it."""
